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
