"""What is recorded of an error that ended a script."""

import faulthandler
import json

from fsdplaunch.runtime.auto.dtensor.error_notes import explaining_mixtures
from fsdplaunch.runtime.failure import conclude


def test_what_was_noted_on_torchs_error_is_the_hint_of_the_report(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        with explaining_mixtures():
            raise RuntimeError("aten.cat.default got mixed torch.Tensor and DTensor")
    except RuntimeError as error:
        assert conclude(error) == 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    message, _, hint = json.loads(path.read_text())["message"]["message"].partition("\nhint: ")
    assert message == "RuntimeError: aten.cat.default got mixed torch.Tensor and DTensor"
    assert hint.startswith(
        "a sharded parameter is a full tensor only while its model computes. Compute this in the"
    )
    assert "\n" not in hint
