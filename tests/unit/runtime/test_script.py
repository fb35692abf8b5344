"""What a failed worker leaves for the launcher's report."""

import json
from pathlib import Path

import pytest

from fsdplaunch.runtime import script


def test_note_of_this_package_at_torchs_error_is_the_hint_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(script.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    error = RuntimeError("got mixed torch.Tensor and DTensor")
    error.add_note("the script's own")
    error.add_note("fsdplaunch: a sharded parameter is a full tensor only while its model computes.\nShard it")
    assert script.conclude(error) == 1
    message = json.loads(file.read_text())["message"]["message"]
    assert message == (
        "RuntimeError: got mixed torch.Tensor and DTensor"
        "\nhint: a sharded parameter is a full tensor only while its model computes. Shard it"
    )


def test_checkpoint_exception_of_torch_is_recorded_as_what_its_ranks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint import CheckpointException

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(script.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    missing, full = RuntimeError("Missing key in checkpoint state_dict: a.weight."), OSError("full")
    failed = CheckpointException("load", {0: (missing, []), 1: (missing, []), 2: (full, [])})
    assert script.conclude(failed) == 1
    assert json.loads(file.read_text())["message"]["message"] == (
        "CheckpointException: RuntimeError: Missing key in checkpoint state_dict: a.weight. (rank 0, 1)\n"
        "OSError: full (rank 2)"
    )
