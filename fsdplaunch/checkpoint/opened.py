"""A checkpoint that is open for reading, whatever its format: what it holds, and where the bytes are."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.checkpoint.collection import no_collection
from fsdplaunch.checkpoint.headers import read_items
from fsdplaunch.checkpoint.hf_shards import read_shards
from fsdplaunch.checkpoint.index import INDEX_NAME, CheckpointIndex, StoredTensor, read_index
from fsdplaunch.checkpoint.item import Item
from fsdplaunch.checkpoint.places import Place
from fsdplaunch.checkpoint.rank_files import RANK_FILE, read_rank_files
from fsdplaunch.checkpoint.sources import Sources, open_sources


@dataclass(frozen=True, slots=True)
class Opened:
    """An open checkpoint.

    Attributes:
        folder: Where it stands.
        index: What it says it holds.
        sources: Its data files.
        known: Where each chunk's bytes are when the headers said so already; None: its items have to be read.
    """

    folder: Path
    index: CheckpointIndex
    sources: Sources
    known: dict[Place, Item] | None

    def items(self, tensors: Iterable[StoredTensor]) -> dict[Place, Item]:
        """Return where each chunk's bytes of `tensors` are, by its place."""
        if self.known is not None:
            return self.known
        with no_collection():
            return read_items(self.sources, tensors)


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Opened]:
    """Read what a checkpoint folder holds and open its files.

    Raises:
        CheckpointError: When it is damaged, incomplete or hostile.
    """
    with no_collection():
        if (folder / INDEX_NAME).is_file():
            index, known = read_index(folder), None
        elif any(RANK_FILE.fullmatch(path.name) for path in folder.iterdir()):
            index, known = read_rank_files(folder)
        else:
            index, known = read_shards(folder)
    with open_sources(folder, index) as sources:
        yield Opened(folder, index, sources, known)
