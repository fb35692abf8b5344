"""What a run's record says about ranks that never sharded; a result that cannot be written down."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdplaunch.config.schema.config import build_config
from fsdplaunch.launch.diagnosis import diagnose_record
from fsdplaunch.launch.run_result import RunResult
from fsdplaunch.launch.runner import _read_record, _written, unsharded_ranks
from fsdplaunch.run_dir import RESULT, SHARDED, rank_folder, read_json


@pytest.mark.parametrize(
    ("shard", "missing"), [("auto", [1]), ("always", [1]), ("explicit", [1]), ("off", [])], ids=str
)
def test_rank_without_a_sharded_model_is_found_unless_nobody_was_to_shard(
    tmp_path: Path, shard: Any, missing: list[int]
) -> None:
    config = build_config({("distributed_type",): "FSDP"})
    plan: Any = SimpleNamespace(
        target=SimpleNamespace(is_python=True),
        config=replace(config, launch=replace(config.launch, shard=shard)),
        env={},
        run_dir=tmp_path,
    )
    folder = rank_folder(tmp_path, 0)
    folder.mkdir(parents=True)
    (folder / SHARDED).touch()
    record = {"attempts": [{"workers": [{"rank": 0}, {"rank": 1}]}]}
    assert unsharded_ranks(plan, record) == missing


def test_a_result_that_finds_no_room_is_the_runs_all_the_same(tmp_path: Path) -> None:
    result = RunResult(exit_code=0, seconds=1.0)
    plan: Any = SimpleNamespace(run_dir=tmp_path)
    assert _written(plan, result) == result
    assert read_json(tmp_path / RESULT)["exit_code"] == 0
    gone: Any = SimpleNamespace(run_dir=tmp_path / "gone")
    assert _written(gone, result) == replace(result, unwritten="No such file or directory")


def test_agent_that_could_not_write_its_record_on_a_full_disk_is_no_riddle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = SimpleNamespace(run_dir=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8192))
    status, record = _read_record(plan, 1, [], 0)
    assert (status, record["error"]) == (1, f"{tmp_path} has no space left (8 KiB)")
    found = diagnose_record(record, build_config({}), python="python", folder="")
    assert found.why.startswith("the disk with the run's folder is full")
