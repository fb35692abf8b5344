"""Checkpoints that another version of torch wrote are read; those whose index does not fit together are not."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from fsdplaunch.errors import CheckpointError
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


def test_weights_that_an_index_only_half_describes_are_not_left_as_they_were(tmp_path: Path) -> None:
    dcp.save({"v": torch.ones(4), "w": torch.arange(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    index = pickle.loads(path.read_bytes())
    one, other = (info for key, info in sorted(index.storage_data.items(), key=lambda entry: entry[0].fqn))
    other.offset = one.offset
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="share bytes"):  # more such: tests/unit/checkpoint/safe_pickle
        SafeReader(tmp_path).read_metadata()
