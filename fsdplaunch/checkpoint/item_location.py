"""Where the items of a checkpoint stand in its files."""

from typing import NamedTuple


class ItemLocation(NamedTuple):
    """Where one item stands: a file of the checkpoint, a byte offset and a length in bytes."""

    file: str
    offset: int
    length: int


class ItemKey(NamedTuple):
    """What names one item: the entry it belongs to, and its chunk's offset when that is a tensor."""

    fqn: str
    offset: tuple[int, ...] | None
