"""What is gathered for a save is kept in files that have no name."""

import tempfile
from pathlib import Path

import pytest
import torch

from fsdplaunch.runtime.state_dict import gather


def test_gathered_tensors_are_plain_ones_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gather, "SMALLEST", 8)
    for value in (torch.randn(30, 7).bfloat16(), torch.tensor([True, False] * 9), torch.randn(4) * 1j):
        kept = gather.spooled(value)
        assert type(kept) is torch.Tensor
        assert kept.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
        assert (kept.dtype, kept.shape) == (value.dtype, value.shape)
        assert torch.equal(kept, value)
        kept.zero_()  # it may be written, too
        assert not kept.any()
    assert not list(tmp_path.iterdir())
    assert gather.spooled(small := torch.ones(1)) is small
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert gather.spooled(value) is value  # no room for it
