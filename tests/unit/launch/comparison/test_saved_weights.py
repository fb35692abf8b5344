"""Weights that a run has saved are found, by their names and by when they were written."""

import os
from pathlib import Path

import pytest

from fsdplaunch.comparison import verdict
from fsdplaunch.comparison.verdict import saved_since


def _write(path: Path, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"1")
    os.utime(path, (seconds, seconds))


def test_the_newest_weights_since_then_are_found(tmp_path: Path) -> None:
    _write(tmp_path / "out" / "checkpoint-1" / "model.safetensors", 100)
    _write(tmp_path / "out" / "checkpoint-2" / "shards" / "__0_0.distcp", 101)
    _write(tmp_path / "out" / "trainer_state.json", 102)
    _write(tmp_path / "runs" / ".one-compare" / "parameters.safetensors", 103)
    assert saved_since(tmp_path, 100) == Path("out/checkpoint-2/shards/__0_0.distcp")
    assert saved_since(tmp_path, 101.5) is None


def test_what_cannot_be_looked_at_and_what_is_too_much_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone.pt").symlink_to("nowhere")
    assert saved_since(tmp_path, 0.0) is None
    _write(tmp_path / "a" / "b" / "model.pt", 100)
    assert saved_since(tmp_path, 99) == Path("a/b/model.pt")
    monkeypatch.setattr(verdict, "_AT_MOST", 0)
    assert saved_since(tmp_path, 99) is None
