"""Read torch's distributed checkpoints without letting the pickles in them run code.

Torch unpickles a checkpoint's index, and every value in it that is no tensor, with the full unpickler: whoever
wrote the file decides what runs. Here the index may name only the inert classes an index is made of, and values
are read with torch's own weights-only rules.
"""

import importlib
import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem

from fsdplaunch.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_INERT = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    *(
        (_METADATA, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _Properties(TensorProperties):
    """What an index says of a tensor; torch 2.15 adds strides, which older ones do not take and nobody needs."""

    def __setstate__(self, state: Any) -> None:
        fields = 6 if hasattr(TensorProperties, "strides") else 5
        super().__setstate__(state[:fields])  # type: ignore[no-untyped-call]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _INERT:
            msg = f"the checkpoint's index names {module}.{name}, which has no place there"
            raise CheckpointError(msg, hint="do not load checkpoints from people you do not trust")
        if (module, name) == (_METADATA, "TensorProperties"):
            return _Properties
        return getattr(importlib.import_module(module), name)


class SafeReader(FileSystemReader):
    """Torch's reader of a checkpoint folder, with an index that cannot run code."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read the index.

        Raises:
            CheckpointError: It names a class or function that no index needs.
        """
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            metadata: Metadata = _Unpickler(io.BytesIO(file.read())).load()
        storage = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        metadata.storage_meta = storage
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner, reading values that are no tensors under the weights-only rules."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read one value that is no tensor."""
        plain = torch.load(value, weights_only=True)
        box = io.BytesIO()
        torch.save(plain, box)  # what torch reads next holds nothing but what was allowed above
        box.seek(0)
        super().load_bytes(read_item, box)
