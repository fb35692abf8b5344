"""A checkpoint that is open for reading, whatever its format: what it holds, and where the bytes are."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.checkpoint.gc_pause import gc_pause
from fsdplaunch.checkpoint.index_file import INDEX_NAME
from fsdplaunch.checkpoint.item_location import ItemLocation
from fsdplaunch.checkpoint.readers.data_files import DataFiles, open_data_files
from fsdplaunch.checkpoint.readers.dcp_headers import read_items
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, StoredTensor, read_index
from fsdplaunch.checkpoint.readers.hf_shards import read_shards
from fsdplaunch.checkpoint.readers.rank_files import RANK_FILE, read_rank_files
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.readers.xla_files import XLA_FILE, read_xla_files


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """An open checkpoint.

    Attributes:
        folder: Where it stands.
        index: What it says it holds.
        sources: Its data files.
        known: Where each chunk's bytes are when the headers had it already; None: its items have to be read.
    """

    folder: Path
    index: CheckpointIndex
    sources: DataFiles
    known: dict[ItemLocation, TorchZipItem] | None

    def items(self, tensors: Iterable[StoredTensor]) -> dict[ItemLocation, TorchZipItem]:
        """Return where each chunk's bytes of `tensors` are, by its place."""
        if self.known is not None:
            return self.known
        with gc_pause():
            return read_items(self.sources, tensors)


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[OpenCheckpoint]:
    """Read what a checkpoint folder holds and open its files.

    Raises:
        CheckpointError: When it is damaged, incomplete or hostile.
    """
    with gc_pause():
        if (folder / INDEX_NAME).is_file():
            index, known = read_index(folder), None
        elif any(RANK_FILE.fullmatch(path.name) for path in folder.iterdir()):
            index, known = read_rank_files(folder)
        elif any(XLA_FILE.fullmatch(path.name) for path in folder.iterdir()):
            index, known = read_xla_files(folder)
        else:
            index, known = read_shards(folder)
    with open_data_files(folder, index) as sources:
        yield OpenCheckpoint(folder, index, sources, known)
