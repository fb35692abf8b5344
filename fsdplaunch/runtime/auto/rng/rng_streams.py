"""Random numbers: streams that all workers share, for order and evaluation, and one of each worker's own.

Needed because all workers run the same script with the same seed: they must agree on the shuffled order of the
data and on initial values, and must not draw the same batches, noise and dropout. What they draw while the script
evaluates is the same again: validation losses, and what is decided by them, are then equal on all of them.
"""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line

_STRIDE = 1_000_003
"""Between the seeds of neighbouring ranks; a prime, so that a script's own seeds in a row do not meet them."""


@dataclass(slots=True, kw_only=True)
class RngStreams:
    """The generators of one worker.

    Attributes:
        rank: Among those that read different data. Rank 0 goes on as one process would; others diverge from it.
        kept: All ranks go on alike, for a run that computes what one process would.
        scripts: Each rank's draws are the script's own business: it is alone, or a script for several ranks.
        begun: Whether training has begun.
        seeds: What the script seeded last before that, by generator: the line and the seed.
        diverged: Whether they have diverged.
        evaluating: Whether the script evaluates.
        alike: Whether what is drawn now is drawn for all ranks, whose rows it is not divided by.
        seed_offset: What is added to a seed that is drawn now.
        own_drawn: Whether anything was drawn from this rank's own stream.
    """

    rank: int
    kept: bool
    scripts: bool = False
    begun: bool = False
    seeds: dict[str, tuple[str, str]] = field(default_factory=dict)
    diverged: bool = False
    evaluating: bool = False
    alike: bool = False
    seed_offset: int = 0
    own_drawn: bool = False
    _own: dict[str, Any] = field(default_factory=dict)
    _main: dict[str, Any] = field(default_factory=dict)
    _aside: dict[str, Any] = field(default_factory=dict)
    _shared: dict[str, Any] = field(default_factory=dict)

    def diverge(self) -> None:
        """Give each rank draws of its own from now on, derived from the script's seed and the rank.

        When training begins, and not before: data that is made or split by drawing is the same on all ranks.
        """
        if self.begun or self.scripts:
            return
        self.begun = True
        self._shared = self._common_states()
        if dist.get_rank():
            set_random_states(self._shared)
        self.diverged = not self.kept
        if self.rank and self.diverged:
            self._reseed(torch.initial_seed())

    def _common_states(self) -> dict[str, Any]:
        """Return rank 0's states; tell where ranks were seeded differently, as by the time. Collective."""
        facts = from_all((random_states() if dist.get_rank() == 0 else None, self.seeds))
        for kind, (line, seed) in self.seeds.items():
            others = {str(seeds[kind][1]) for _, seeds in facts if kind in seeds} - {seed}
            if others:
                messages.say(
                    f"{line}: {kind} is seeded with {seed} here and {min(others)} on another rank: data that were"
                    " split or made by it are not the same on all ranks; seed with the same number"
                )
        states: dict[str, Any] = facts[0][0]
        return states

    def note_seed(self, kind: str, seed: Any) -> None:
        """Remember what the script seeded before training."""
        if not self.begun:
            self.seeds[kind] = (script_line(), str(seed)[:40])

    def _reseed(self, seed: int) -> None:
        mine = (seed + self.rank * _STRIDE) % 2**63
        _TORCH_SEED[0](mine)
        random.seed(mine)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(mine % 2**32)

    def seeded(self, seed: int) -> int:
        """Return what a seed that the script sets means on this rank; the shared stream begins anew with it."""
        self.note_seed("torch", seed)
        if not self.diverged or self.evaluating:
            return seed
        self._shared["torch"] = torch.Generator().manual_seed(seed).get_state()
        return (seed + self.rank * _STRIDE) % 2**63

    def evaluate(self, *, now: bool) -> None:
        """Draw alike on all ranks while the script evaluates, and then go on where each rank was.

        A stream apart from the shared one: what only some ranks evaluate does not change the order of the data.
        """
        if self.diverged and now != self.evaluating:
            self.evaluating = now
            others, self._aside = self._aside or dict(self._shared), random_states()
            set_random_states(others)

    @property
    def draws_own(self) -> bool:
        """Return whether what is drawn now is from this rank's own stream, apart from what all go on with."""
        return bool(self._main)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Draw from the stream that is the same on all ranks."""
        before, self.alike = self.alike, True
        try:
            with self._outside_own() if self._main else self._from_shared():
                yield
        finally:
            self.alike = before

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw from this rank's own stream, also where all ranks otherwise go on alike."""
        if self.diverged or self._main:
            yield
            return
        self._main = random_states()
        if self._own:
            set_random_states(self._own)
        else:
            self._reseed(torch.initial_seed())
        before = random_states()
        try:
            yield
        finally:
            self._own = random_states()
            self.own_drawn = self.own_drawn or not equal_states(before, self._own)
            set_random_states(self._main)
            self._main = {}

    @contextmanager
    def _outside_own(self) -> Iterator[None]:
        mine = random_states()
        set_random_states(self._main)
        try:
            yield
        finally:
            self._main = random_states()
            set_random_states(mine)

    @contextmanager
    def seeding(self) -> Iterator[None]:
        """Let a loader's processes get seeds of each rank's own, from the stream that all go on with."""
        self.seed_offset = self.rank * _STRIDE
        try:
            yield
        finally:
            self.seed_offset = 0

    @contextmanager
    def _from_shared(self) -> Iterator[None]:
        if not self.diverged:
            yield
            return
        mine = random_states()
        set_random_states(self._shared)
        try:
            yield
        finally:
            self._shared = random_states()
            set_random_states(mine)


_TORCH_SEED = [torch.manual_seed]
"""Torch's own function, whatever stands in its place."""


def random_states() -> dict[str, Any]:
    """Return the states of the generators of torch, Python and numpy on the CPU."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def equal_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether nothing was drawn between two states of the generators."""
    if not torch.equal(one["torch"], other["torch"]) or one["python"] != other["python"]:
        return False
    numpys = [states["numpy"] for states in (one, other) if "numpy" in states]
    return len({(state[1].tobytes(), *state[2:]) for state in numpys}) < 2  # noqa: PLR2004


def set_random_states(states: dict[str, Any]) -> None:
    """Set the states of the generators of torch, Python and numpy."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


@contextmanager
def drawing_alike_in_evaluation(streams: RngStreams, models: Iterable[nn.Module]) -> Iterator[None]:
    """Notice when `model.eval()` and `model.train()` turn all sharded models to evaluation, or one to training."""
    inside = False

    def turn(original: Any) -> Any:
        def train(self: nn.Module, mode: bool = True) -> Any:
            nonlocal inside
            if inside or not streams.diverged:
                return original(self, mode)
            inside = True  # it calls itself for every module below
            try:
                return original(self, mode)
            finally:
                inside = False
                streams.evaluate(now=not any(model.training for model in list(models)))

        return train

    with replaced(nn.Module, "train", turn):
        yield


@contextmanager
def seeding_by_rank(streams: RngStreams) -> Iterator[None]:
    """Give a seed that the script sets later, for each epoch say, its offset by the rank."""

    def offset(original: Any) -> Any:
        def manual_seed(seed: Any) -> Any:
            return original(streams.seeded(int(seed)))

        return manual_seed

    with replaced(torch, "manual_seed", offset):
        yield
