"""Checkpoints that another version of torch wrote are read; those whose index does not fit together are not."""

import pickle
from collections.abc import Callable
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


def _no_chunk(index: Any) -> None:
    index.state_dict_metadata["w"].chunks.clear()


def _part_of_it(index: Any) -> None:
    index.state_dict_metadata["w"].chunks[0].sizes = (3,)


def _elsewhere(index: Any) -> None:
    index.state_dict_metadata["w"].chunks[0].offsets = (2,)
    index.state_dict_metadata["w"].size = (6,)
    index.state_dict_metadata["w"].chunks.append(type(index.state_dict_metadata["w"].chunks[0])((0,), (2,)))


def _anothers_bytes(index: Any) -> None:
    one, other = (info for key, info in sorted(index.storage_data.items(), key=lambda entry: entry[0].fqn))
    other.offset = one.offset


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_chunk, "chunks cover 0 of its 4"),
        (_part_of_it, "chunks cover 3 of its 4"),
        (_elsewhere, "has no bytes in any file"),
        (_anothers_bytes, "share bytes"),
    ],
)
def test_weights_that_an_index_only_half_describes_are_not_left_as_they_were(
    tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    dcp.save({"v": torch.ones(4), "w": torch.arange(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        SafeReader(tmp_path).read_metadata()
