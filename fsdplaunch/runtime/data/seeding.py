"""Make from one number the seeds that a script leaves to chance, so that several processes begin alike.

Data that Python's or numpy's generators split must be split alike, and these are seeded by chance in every
process. Torch's own begins alike on the ranks of one node only.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.random.bit_generator as numpy_generators
import torch

from fsdplaunch.runtime.patch import replaced


def _never() -> bool:
    return False


def _ignore(_kind: str, _seed: Any) -> None:
    """Do nothing with a seed that the script sets."""


class Seeds:
    """What comes in the place of chance.

    Args:
        seed: Of all of them.
        ends: Return whether chance is to be left to itself from now on.
        note: Called with a generator's name and the seed that the script sets itself.
    """

    def __init__(
        self, seed: int, *, ends: Callable[[], bool] = _never, note: Callable[[str, Any], None] = _ignore
    ) -> None:
        self.ends, self.note = ends, note
        self.source = random.Random(seed)  # noqa: S311  (no secrets)

    def given(self, original: Any, kind: str, bits: int) -> Any:
        """Return a function that takes a seed, or None for one by chance."""

        def seed(*args: Any, **kwargs: Any) -> Any:
            by_chance = all(value is None for value in (*args, *kwargs.values()))
            if not by_chance:
                self.note(kind, (*args, *kwargs.values())[0])
            if not by_chance or self.ends():
                return original(*args, **kwargs)
            return original(self.source.getrandbits(bits))

        return seed

    def of_numpy(self, original: Any) -> Any:
        """Return what gives numpy's generators their bits where they get no seed: `default_rng()`, `PCG64()`."""

        def randbits(bits: int) -> int:
            return int(original(bits)) if self.ends() else self.source.getrandbits(bits)

        return randbits

    def of_torch(self, original: Any) -> Any:
        """Return a `torch.seed`, which sets a seed by chance and returns it."""

        def seed() -> int:
            if self.ends():
                return int(original())
            chosen = self.source.getrandbits(63)
            torch.manual_seed(chosen)
            return chosen

        return seed


@contextmanager
def seeding_from(seeds: Seeds) -> Iterator[None]:
    """Let the seeds that a script leaves to chance come from others."""
    with ExitStack() as stack:
        stack.enter_context(replaced(random, "seed", lambda original: seeds.given(original, "random", 64)))
        stack.enter_context(replaced(np.random, "seed", lambda original: seeds.given(original, "numpy", 32)))
        stack.enter_context(replaced(numpy_generators, "randbits", seeds.of_numpy))
        stack.enter_context(replaced(torch, "seed", seeds.of_torch))
        yield
