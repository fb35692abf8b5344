"""Ordinary one-process scripts, unchanged: over several ranks they compute and write what one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.scripts.conftest import PROGRAMS, RANKS, Forks, Run

TOLERANCE = 1e-4
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_program_over_ranks_computes_and_writes_what_one_process_does(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    plain = forks.passes(PROGRAMS / f"{name}.py", tmp_path / "plain")
    assert plain.losses(), plain.out
    many = forks.passes(PROGRAMS / f"{name}.py", tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert many.losses() == pytest.approx(plain.losses(), abs=TOLERANCE)
    assert_sharded(many)
    assert_same_files(plain.folder, many.folder)


def assert_sharded(run: Run) -> None:
    """Every parameter is sharded, and no rank holds more of a model than its shard and one odd row of each."""
    assert all(run.parameters), run.err
    for found in zip(*run.parameters, strict=True):
        assert all(param["sharded"] for param in found), found
        assert sum(param["local"] for param in found) == found[0]["numel"]


def assert_same_files(one: Path, other: Path) -> None:
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(other)) for path in other.rglob("*") if path.is_file())
    assert any(name.endswith((".pt", ".pth", ".safetensors", ".bin")) for name in names)
    for name in names:
        if name.endswith(".safetensors"):
            assert_same(load_file(one / name), load_file(other / name), name)
        elif name.endswith((".pt", ".pth", ".bin")):
            assert_same(read(one / name), read(other / name), name)
        else:
            assert (one / name).read_text() == (other / name).read_text()


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def assert_same(one: Any, other: Any, where: str) -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape, where
        assert one.dtype == other.dtype, where
        torch.testing.assert_close(other, one, rtol=1e-3, atol=TOLERANCE, msg=lambda text: f"{where}: {text}")
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    elif isinstance(one, float):
        assert other == pytest.approx(one, abs=TOLERANCE), where
    else:
        assert one == other, where
