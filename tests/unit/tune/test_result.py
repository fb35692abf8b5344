"""What is said of a search that has ended: table, words, JSON, YAML."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplaunch.config.load import load_config
from fsdplaunch.tune.result import TuneResult, table_lines, winner_text
from fsdplaunch.tune.search import Duel, Row
from fsdplaunch.tune.space import Candidate
from fsdplaunch.tune.trial import Outcome
from tests.yaml_config import config_of

MIB = 1024**2
RESHARD = ("fsdp_config", "fsdp_reshard_after_forward")
CHECKPOINTING = ("fsdp_config", "fsdp_activation_checkpointing")
YOURS, KEEPS, FAILS = Candidate(), Candidate(((RESHARD, False),)), Candidate(((CHECKPOINTING, True),))


def outcome(seconds, memory=100 * MIB):
    return Outcome(seconds=(seconds * 0.9, seconds, seconds * 1.1), memory=memory, wall=3)


@pytest.fixture
def result():
    """Three candidates: yours, one that keeps what was gathered and is faster, one that failed."""
    rows = (
        Row(candidate=YOURS, state="slower", outcomes=[outcome(0.25), outcome(0.2)]),
        Row(candidate=KEEPS, state="measured", outcomes=[outcome(0.14, 150 * MIB)]),
        Row(candidate=FAILS, state="failed", reason="rank 0: <ValueError>", outcomes=[]),
    )
    pair = (outcome(0.15), outcome(0.2))
    duel = Duel(first=KEEPS, second=YOURS, rounds=(pair, pair), verdict="first")
    return TuneResult(
        script="train.py", config="fsdp.yaml", folder=Path("/runs/a-tune"), world=2, device="cpu",
        limit=200 * MIB, rows=rows, kept=KEEPS, duels=(duel,), is_complete=True, seconds=12.5,
    )  # fmt: skip


def test_table_is_sorted_by_the_steps_it_shows_and_one_number_says_what_the_best_gained(result):
    text = list(table_lines(result))
    assert re.match(r"\* reshard_after_forward=false +140.0 ms \(133.0 ms to 147.0 ms\)", text[1])
    assert "150.0 MiB of 200.0 MiB" in text[1]
    assert text[2].endswith("slower")
    assert text[3].endswith(" failed: rank 0: <ValueError>")
    assert text[5:] == [
        f"{KEEPS.label} and yours: {KEEPS.label} takes 25 % less time, clear after 2 rounds in turn",
        "best: reshard_after_forward=false, 1.33 times the speed of yours",
    ]


def test_words_without_a_winner_and_when_stopped(result):
    assert "no candidate fits" in list(table_lines(replace(result, kept=None)))
    stopped = replace(result, kept=YOURS, is_complete=False)
    assert list(table_lines(stopped))[-1] == "so far, yours is the one to keep: nothing tried is clearly faster"
    assert stopped.speed == 1.0


def test_written_file_keeps_the_users_text_and_says_what_was_gained(result, tmp_path):
    file = tmp_path / "fsdp.yaml"
    file.write_text("# mine\nfsdp_config:\n  fsdp_version: 2  # two\n")
    config = load_config(file, overrides=["fsdp_reshard_after_forward=false"]).config
    text = winner_text(result, config, load_config(file, overrides=()))
    assert text.startswith("# measured by fsdplaunch tune train.py: 140.0 ms per step on 2 workers, 1.33 times")
    assert "# mine" in text
    assert config_of(text=text) == config
    file.write_text(text)
    assert winner_text(result, config, load_config(file, overrides=())) == text

    unchanged = load_config(file, overrides=())
    first, *rest = winner_text(replace(result, kept=YOURS), unchanged.config, unchanged).splitlines()
    assert first.endswith("200.0 ms per step on 2 workers, unchanged: nothing tried is clearly faster")
    assert rest == text.splitlines()[1:]
