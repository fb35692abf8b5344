"""Rule 4, random numbers: alike on all ranks until training begins and in evaluation, then each worker its own.

With the global batch kept they are alike throughout. Python's and numpy's generators are seeded, never replaced.
"""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.config.environment import COMPARE_DIR
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import from_all, from_rank_0
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.random_numbers import SEED, random_states, seeding_from, set_random_states

_STRIDE = 1_000_003
"""Between the seeds of neighbouring ranks; a prime, so that a script's own seeds in a row do not meet them."""


@dataclass(slots=True, kw_only=True)
class RngStreams:
    """The generators of one worker. Rank 0 goes on as one process would; others diverge from it."""

    rank: int  # among those that read different data
    kept: bool  # all ranks go on alike, for a run that computes what one process would
    scripts: bool = False  # a rank's draws are the script's business: it is alone, or written for several ranks
    begun: bool = False  # training has
    seeds: dict[str, tuple[str, str]] = field(default_factory=dict)  # set last before that: lines and seeds
    diverged: bool = False
    evaluating: bool = False
    _aside: dict[str, Any] = field(default_factory=dict)
    _shared: dict[str, Any] = field(default_factory=dict)

    def diverge(self) -> None:
        """Give each rank draws of its own from now on, derived from the script's seed and the rank. Collective.

        When training begins, and not before: data that is made or split by drawing is the same on all ranks.
        """
        if self.begun or self.scripts:
            return
        self.begun = True
        facts = from_all((random_states() if dist.get_rank() == 0 else None, self.seeds))
        for kind, (line, seed) in self.seeds.items():
            others = {str(seeds[kind][1]) for _, seeds in facts if kind in seeds} - {seed}
            if others:  # as by the time
                messages.say(
                    f"{line}: {kind} is seeded with {seed} here and {min(others)} on another rank: data that were"
                    " split or made by it are not the same on all ranks; seed with the same number"
                )
        self._shared = facts[0][0]
        if dist.get_rank():
            set_random_states(self._shared)
        self.diverged = not self.kept
        if self.rank and self.diverged:
            mine = (torch.initial_seed() + self.rank * _STRIDE) % 2**63
            _TORCH_SEED[0](mine)
            random.seed(mine)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(mine % 2**32)

    def note_seed(self, kind: str, seed: Any) -> None:
        """Remember what the script seeded before training."""
        if not self.begun:
            self.seeds[kind] = (script_line(), str(seed)[:40])

    def seeded(self, seed: int) -> int:
        """Return what a seed that the script sets means on this rank; the shared stream begins anew with it."""
        self.note_seed("torch", seed)
        if not self.diverged or self.evaluating:
            return seed
        for kind, device in (("torch", "cpu"), ("cuda", "cuda")):
            if kind in self._shared:
                self._shared[kind] = torch.Generator(device).manual_seed(seed).get_state()
        return (seed + self.rank * _STRIDE) % 2**63

    def evaluate(self, *, now: bool) -> None:
        """Draw alike on all ranks while the script evaluates, and then go on where each rank was.

        A stream apart from the shared one: what only some ranks evaluate does not change the order of the data.
        """
        if self.diverged and now != self.evaluating:
            self.evaluating = now
            others, self._aside = self._aside or dict(self._shared), random_states()
            set_random_states(others)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Draw from the stream that is the same on all ranks."""
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


_TORCH_SEED = [torch.manual_seed]  # torch's own function, whatever stands in its place


def seed_ranks(streams: RngStreams, size: int, undo: ExitStack) -> None:
    """Give all ranks rank 0's states at the start, and seed each by what the script does later. Collective."""

    def offset(original: Any) -> Any:
        def manual_seed(seed: Any) -> Any:
            return original(streams.seeded(int(seed)))

        return manual_seed

    undo.enter_context(replaced(torch, "manual_seed", offset))
    if size > 1:
        chosen = SEED if os.environ.get(COMPARE_DIR) else random.getrandbits(64)
        states, seed = from_rank_0((random_states(), chosen))
        set_random_states(states)
        undo.enter_context(seeding_from(seed, ends=lambda: streams.diverged, note=streams.note_seed))
