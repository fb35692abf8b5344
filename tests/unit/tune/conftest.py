"""Searches that have ended, for what is made of them."""

from pathlib import Path

import pytest

from fsdplaunch.tune.result import TuneResult
from fsdplaunch.tune.search import Duel, Row
from fsdplaunch.tune.space import Candidate
from fsdplaunch.tune.trial import Outcome

MIB = 1024**2
RESHARD = ("fsdp_config", "fsdp_reshard_after_forward")
CHECKPOINTING = ("fsdp_config", "fsdp_activation_checkpointing")


def outcome(seconds, memory=100 * MIB):
    return Outcome(seconds=(seconds * 0.9, seconds, seconds * 1.1), memory=memory, wall=3)


@pytest.fixture
def result():
    """Three candidates: yours, one that keeps what was gathered and is faster, one that failed."""
    yours, keeps, fails = Candidate(), Candidate(((RESHARD, False),)), Candidate(((CHECKPOINTING, True),))
    rows = (
        Row(candidate=yours, state="slower", outcomes=[outcome(0.2)]),
        Row(candidate=keeps, state="measured", outcomes=[outcome(0.15, 150 * MIB)]),
        Row(candidate=fails, state="failed", reason="rank 0: <ValueError>", outcomes=[]),
    )
    pair = (outcome(0.15), outcome(0.2))
    duel = Duel(first=keeps, second=yours, rounds=(pair, pair), verdict="first")
    return TuneResult(
        script="train.py", config="fsdp.yaml", folder=Path("/runs/a-tune"), world=2, device="cpu",
        limit=200 * MIB, rows=rows, kept=keeps, duels=(duel,), is_complete=True, seconds=12.5,
    )  # fmt: skip
