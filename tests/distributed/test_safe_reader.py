"""Checkpoints that another version of torch wrote are read."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from fsdplaunch.runtime.saving.safe_dcp_reader import SafePlanner, SafeReader


@pytest.mark.parametrize("fields", [5, 6])
def test_index_with_or_without_strides_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: int
) -> None:
    """torch 2.15 writes six facts of a tensor, older versions five."""
    told = TensorProperties.__getstate__

    def tell(self: TensorProperties) -> Any:
        return (*told(self)[:5], (1,))[:fields]  # type: ignore[no-untyped-call]

    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", tell)
        dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    read = {"w": torch.zeros(4)}
    dcp.load(read, storage_reader=SafeReader(tmp_path), planner=SafePlanner(), no_dist=True)
    assert torch.equal(read["w"], torch.arange(4.0))
