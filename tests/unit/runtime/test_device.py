"""Which GPU a script sees that takes its way for one process."""

import os

import pytest

from fsdplaunch.runtime.device import see_own_gpu


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"LOCAL_RANK": "3"}, ("0", "3")),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, ("0", "6")),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-1a"}, ("0", "GPU-1a")),
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0"}, ("2", "0")),
    ],
)
def test_script_for_one_gpu_sees_its_own_as_number_0(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: tuple[str, str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    see_own_gpu()
    assert (os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"]) == after
    os.environ.pop("CUDA_VISIBLE_DEVICES")
