"""Draw by rejection for the rows of the global batch: gamma, beta, Poisson and binomial numbers.

How many random numbers each of these takes depends on its parameter. Where all rows have one, every rank can draw
for all rows; otherwise it draws for its own from a stream of its own, so that what all draw later stays alike.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line

_FUNCTIONS = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
"""What torch.distributions call: Beta a Dirichlet, Gamma, Chi2 and StudentT a gamma."""


@contextmanager
def drawing_by_rejection(
    hook_context: HookContext, dim_of_rows: Callable[[torch.Tensor], int | None]
) -> Iterator[None]:
    """Draw as one process does where all rows have one parameter, and tell where they have not.

    Args:
        hook_context: This worker's.
        dim_of_rows: Tells which dimension of what is drawn has the rows of the batch, if any.
    """

    def make(original: Any) -> Any:
        @wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            given = [arg for arg in args if isinstance(arg, torch.Tensor)]
            dim = dim_of_rows(given[0].detach()) if given and given[0].device.type == "cpu" else None
            if dim is None:
                return original(*args, **kwargs)
            if all(_is_one_for_all(tensor, dim) for tensor in given):
                ranks, rank, rows = hook_context.data.size, hook_context.data.rank, given[0].size(dim)
                every = [_repeated(arg, dim, rows * ranks) for arg in args]
                return original(*every, **kwargs).narrow(dim, rank * rows, rows)
            _tell(hook_context, original.__name__.lstrip("_"))
            streams = hook_context.streams
            seen = streams.own_drawn
            with streams.own():
                drawn = original(*args, **kwargs)
            streams.own_drawn = seen  # by items of datasets
            return drawn

        return draw

    with ExitStack() as stack:
        for name in _FUNCTIONS:
            stack.enter_context(replaced(torch, name, make))
        yield


def _is_one_for_all(tensor: torch.Tensor, dim: int) -> bool:
    """Return whether all rows have one parameter by its strides: values are those of this rank's rows."""
    return dim < tensor.dim() and tensor.stride(dim) == 0


def _repeated(value: Any, dim: int, rows: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = [*value.shape[:dim], rows, *value.shape[dim + 1 :]]
    return value.narrow(dim, 0, 1).expand(shape)


def _tell(hook_context: HookContext, name: str) -> None:
    line = script_line()
    if f"rejection {line}" not in hook_context.printed:
        hook_context.printed.add(f"rejection {line}")
        messages.say_unequal(
            f"{line}: {name} draws by a number that each row has of its own: each rank draws its own, which is not"
            " what one process draws for all rows"
        )
