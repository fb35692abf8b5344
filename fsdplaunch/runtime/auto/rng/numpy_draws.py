"""Draw numpy's random numbers for the rows of the global batch and keep this rank's, where it is kept."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.row_order import permuted, tell_once, telling_order
from fsdplaunch.runtime.auto.rng.own_rows import own_rows
from fsdplaunch.runtime.auto.rng.single_draws import count_single
from fsdplaunch.runtime.patch import replaced

_SIZE_FIRST = ("random", "standard_normal", "standard_exponential", "standard_cauchy")
_SIZE_SECOND = ("exponential", "poisson", "geometric", "rayleigh", "weibull", "standard_gamma", "standard_t")
_SIZE_THIRD = ("normal", "uniform", "binomial", "laplace", "beta", "gamma", "gumbel", "logistic", "lognormal")
_OF_NUMPY = {
    **dict.fromkeys((*_SIZE_FIRST, "random_sample"), 0),
    **dict.fromkeys(_SIZE_SECOND, 1),
    **dict.fromkeys((*_SIZE_THIRD, "randint"), 2),
    **dict.fromkeys(("rand", "randn"), None),
}
"""numpy's functions, and where each is given a size; None where that is all its arguments."""
_CHOICE = 1
"""Where `choice` is given a size, of functions and of methods."""
_UNREPEATED = "numbers are chosen for the batch's rows without replacement: each rank chooses among its own"
_OF_GENERATORS = {
    **dict.fromkeys(_SIZE_FIRST, 0),
    **dict.fromkeys(_SIZE_SECOND, 1),
    **dict.fromkeys((*_SIZE_THIRD, "integers"), 2),
}
"""Methods of numpy's newer generators."""


@contextmanager
def drawing_by_numpy(hook_context: HookContext, rows_first: Callable[[Any], bool]) -> Iterator[None]:
    """Draw as one process does.

    Args:
        hook_context: This worker's.
        rows_first: Tells whether a size is that of one value, or several, per row of this rank's batch.
    """
    draws = _NumpyDraws(hook_context, rows_first)
    with ExitStack() as stack:
        for name, position in _OF_NUMPY.items():
            stack.enter_context(replaced(np.random, name, draws.numpys(position)))
        stack.enter_context(replaced(np.random, "choice", draws.choosing))
        stack.enter_context(replaced(np.random, "default_rng", draws.default_rng))
        yield


class _NumpyDraws:
    """This rank's part of what numpy draws."""

    def __init__(self, hook_context: HookContext, rows_first: Callable[[Any], bool]) -> None:
        self.hook_context, self.rows_first = hook_context, rows_first

    def numpys(self, position: int | None) -> Callable[[Any], Any]:
        """Return what makes a function of numpy's global generator.

        Args:
            position: Of the size among its arguments; None where they are the size.
        """

        def make(original: Any) -> Any:
            @wraps(original)
            def draw(*args: Any, **kwargs: Any) -> Any:
                given = args if position is None else kwargs.get("size", (*args[position:], None)[0])
                limits = args[:position] if position is not None else ()
                if (size := self._rows_of(given)) is None or _has_rows(limits, kwargs):
                    if given is None or (isinstance(given, tuple) and not given):
                        count_single(self.hook_context)
                    return original(*args, **kwargs)
                every = (size[0] * self.hook_context.data.size, *size[1:])
                drawn = original(*every) if position is None else original(*limits, **{**kwargs, "size": every})
                return self._own(drawn, size[0])

            return draw

        return make

    def choosing(self, original: Any) -> Any:
        """Make `choice`, of a number or of an array that all ranks have."""

        @wraps(original)
        def choose(*args: Any, **kwargs: Any) -> Any:
            size = self._rows_of(kwargs.get("size", (*args, None, None)[_CHOICE]))
            if size is None:
                return original(*args, **kwargs)
            if not kwargs.get("replace", (*args, True, True, True)[_CHOICE + 1]):
                tell_once(self.hook_context, "unrepeated", _UNREPEATED)
                return original(*args, **kwargs)
            every = (size[0] * self.hook_context.data.size, *size[1:])
            if "size" in kwargs:
                drawn = original(*args, **{**kwargs, "size": every})
            else:
                drawn = original(args[0], every, *args[_CHOICE + 1 :], **kwargs)
            return self._own(drawn, size[0])

        return choose

    def _rows_of(self, given: Any) -> Any:
        """Return a size that is of this rank's rows; None for any other."""
        size = (given,) if isinstance(given, int) else given
        return size if isinstance(size, tuple | list) and self.rows_first(size) else None

    def _own(self, drawn: Any, rows: int) -> Any:
        return drawn[own_rows(self.hook_context, self.hook_context.batches.parts_of(rows))]

    def default_rng(self, original: Any) -> Any:
        """Make the function that makes numpy's newer generators, whose methods cannot be replaced."""
        own = type("Generator", (np.random.Generator,), {})
        for name, position in _OF_GENERATORS.items():
            setattr(own, name, _method(getattr(np.random.Generator, name), self.numpys(position)))
        for name in ("permutation", "shuffle"):
            order = partial(telling_order, self.hook_context, permuted)
            setattr(own, name, _method(getattr(np.random.Generator, name), order))
        own.choice = _method(np.random.Generator.choice, self.choosing)  # type: ignore[attr-defined]

        @wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            return made if isinstance(made, own) else own(made.bit_generator)

        return make


def _method(original: Any, make: Callable[[Any], Any]) -> Any:
    @wraps(original)
    def draw(generator: Any, *args: Any, **kwargs: Any) -> Any:
        return make(partial(original, generator))(*args, **kwargs)

    return draw


def _has_rows(limits: Any, kwargs: Any) -> bool:
    """Return whether numbers are drawn within limits that are arrays, of this rank's rows."""
    return any(np.ndim(each) for each in (*limits, *(value for name, value in kwargs.items() if name != "size")))
