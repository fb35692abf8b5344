"""Seed alike on all ranks what a script leaves unseeded, before training begins.

Needed because all ranks run the script: data split by Python's or numpy's generators must be split alike, and
these are seeded by chance in every process. Torch's own begins alike on the ranks of one node only.
"""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.random.bit_generator as numpy_generators
import torch

from fsdplaunch.config.environment import COMPARE_DIR
from fsdplaunch.runtime.auto.rng.rng_streams import RngStreams, random_states, set_random_states
from fsdplaunch.runtime.collectives.rank_group import from_rank_0
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import is_user_file

SEED = 0
"""Of both runs of a comparison, for scripts that set none: they must begin alike."""


@contextmanager
def seeding_alike(streams: RngStreams, size: int) -> Iterator[None]:
    """Give all ranks rank 0's states, and the seeds that the script leaves to chance later. Collective."""
    if size == 1:
        yield
        return
    chosen = SEED if os.environ.get(COMPARE_DIR) else random.getrandbits(64)
    states, seed = from_rank_0((random_states(), chosen))
    set_random_states(states)
    with seeding_from(streams, seed):
        yield


@contextmanager
def seeding_from(streams: RngStreams, seed: int) -> Iterator[None]:
    """Make the seeds that a script leaves to chance from one number.

    Args:
        streams: Of this process; once they have diverged, chance is left to itself.
        seed: That number.
    """
    seeds = _Seeds(streams, seed)
    with ExitStack() as stack:
        stack.enter_context(replaced(random, "seed", lambda original: seeds.given(original, "random", 64)))
        stack.enter_context(replaced(np.random, "seed", lambda original: seeds.given(original, "numpy", 32)))
        stack.enter_context(replaced(numpy_generators, "randbits", seeds.of_numpy))
        stack.enter_context(replaced(random.Random, "seed", seeds.of_a_generator))
        stack.enter_context(replaced(torch, "seed", seeds.of_torch))
        yield


class _Seeds:
    """What comes in the place of chance."""

    def __init__(self, streams: RngStreams, seed: int) -> None:
        self.streams = streams
        self.source = random.Random(seed)  # noqa: S311  (no secrets)

    def given(self, original: Any, kind: str, bits: int) -> Any:
        """Make a function that takes a seed, or None for one by chance."""

        def seed(*args: Any, **kwargs: Any) -> Any:
            by_chance = all(value is None for value in (*args, *kwargs.values()))
            if not by_chance:
                self.streams.note_seed(kind, (*args, *kwargs.values())[0])
            if not by_chance or self.streams.diverged:
                return original(*args, **kwargs)
            return original(self.source.getrandbits(bits))

        return seed

    def of_numpy(self, original: Any) -> Any:
        """Make where numpy's generators get bits that are given no seed: `RandomState()`, `PCG64()`."""

        def randbits(bits: int) -> int:
            return int(original(bits)) if self.streams.diverged else self.source.getrandbits(bits)

        return randbits

    def of_a_generator(self, original: Any) -> Any:
        """Make `random.Random.seed`, which its constructor calls: for the script's own."""

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            chosen = self.source.getrandbits(64) if a is None and self._is_the_scripts(generator) else a
            original(generator, chosen, version)

        return seed

    def _is_the_scripts(self, generator: random.Random) -> bool:
        """Return whether the user's own code makes or seeds a generator: those of libraries name files."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename == random.__file__ and frame.f_back is not None:
            frame = frame.f_back
        begins = generator is not self.source and not self.streams.diverged
        return begins and is_user_file(frame.f_code.co_filename)

    def of_torch(self, original: Any) -> Any:
        """Make `torch.seed`, which sets a seed by chance and returns it."""

        def seed() -> int:
            if self.streams.diverged:
                return int(original())
            chosen = self.source.getrandbits(63)
            torch.manual_seed(chosen)
            return chosen

        return seed
