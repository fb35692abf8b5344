"""The random generators that a script draws from (torch's, Python's, numpy's): their states and their seeds.

Data that Python's or numpy's generators split must be split alike, and these are seeded by chance in every
process. Torch's own begins alike on the ranks of one node only.
"""

import os
import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.random.bit_generator as numpy_generators
import torch

from fsdplaunch.runtime.patch import replaced

SEED = 0
"""Of both runs of a comparison, for scripts that set none: they must begin alike."""


def random_states() -> dict[str, Any]:
    """Return the states of the generators, of this worker's GPU, and of numpy where something has imported it."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the states of the generators."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def seed_all(seed: int) -> None:
    """Seed the generators with one number."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_by_chance(seeded: Collection[str]) -> None:
    """Seed "random" and "numpy" as the operating system has it, where the script has not seeded them."""
    if "random" not in seeded:
        random.seed(int.from_bytes(os.urandom(8)))
    if "numpy" not in seeded and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4)))


def random_digest() -> str:
    """Return what is equal for processes that have drawn the same from equal states on the CPU."""
    states = random_states()
    found = blake2b(states["torch"].numpy().tobytes(), digest_size=8)
    found.update(repr(states["python"]).encode())
    if "numpy" in states:
        _, keys, *rest = states["numpy"]
        found.update(keys.tobytes() + repr(rest).encode())
    return found.hexdigest()


@contextmanager
def seeding_from(
    number: int, *, ends: Callable[[], bool] = lambda: False, note: Callable[[str, Any], None] = lambda *_: None
) -> Iterator[None]:
    """Let the seeds that a script leaves to chance come from a number, until `ends` says that they need not.

    `note` is called with a generator's name and the seed that the script sets itself.
    """
    source = random.Random(number)  # noqa: S311  (no secrets)

    def given(original: Any, kind: str, bits: int) -> Any:
        def seed(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            by_chance = all(value is None for value in values)
            if not by_chance:
                note(kind, values[0])
            if not by_chance or ends():
                return original(*args, **kwargs)
            return original(source.getrandbits(bits))

        return seed

    def of_numpy(original: Any) -> Any:  # its generators' bits where they get no seed: `default_rng()`, `PCG64()`
        return lambda bits: int(original(bits)) if ends() else source.getrandbits(bits)

    def of_torch(original: Any) -> Any:  # which sets a seed by chance and returns it
        def seed() -> int:
            if ends():
                return int(original())
            chosen = source.getrandbits(63)
            torch.manual_seed(chosen)
            return chosen

        return seed

    with ExitStack() as stack:
        stack.enter_context(replaced(random, "seed", lambda original: given(original, "random", 64)))
        stack.enter_context(replaced(np.random, "seed", lambda original: given(original, "numpy", 32)))
        stack.enter_context(replaced(numpy_generators, "randbits", of_numpy))
        stack.enter_context(replaced(torch, "seed", of_torch))
        yield
