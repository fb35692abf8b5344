"""States of the random generators that a script draws from: torch's, Python's and numpy's."""

import os
import random
import sys
from collections.abc import Collection
from hashlib import blake2b
from typing import Any

import torch

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
    """Seed Python's and numpy's generators as the operating system has it, where the script has not.

    Args:
        seeded: Which the script has seeded: "random", "numpy".
    """
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
