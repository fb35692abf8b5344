"""Chunks of stored tensors: the rectangle that each covers, and where its bytes stand in a checkpoint's files."""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

_PRIME = 2**61 - 1


class Region(NamedTuple):
    """A rectangle of a tensor, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements inside."""
        return math.prod(self.sizes)


def find_tiling_fault(shape: tuple[int, ...], regions: Sequence[Region]) -> str | None:
    """Say how `regions` of at least one element each fail to cover `shape` exactly once, or None when they do."""
    for region in regions:
        if not len(shape) == len(region.offsets) == len(region.sizes):
            return f"a chunk has {len(region.sizes)} dimensions and {len(region.offsets)} offsets"
        if any(start + size > length for start, size, length in zip(*region, shape, strict=True)):
            return f"the chunk at {list(region.offsets)} of size {list(region.sizes)} reaches outside"
    covered, numel = sum(region.numel for region in regions), math.prod(shape)
    if covered < numel:
        return f"chunks cover {covered} of its {numel} elements"
    if covered > numel:
        return f"chunks overlap: they hold {covered} elements, the tensor has {numel}"
    if len(regions) > 1 and not _is_tiled(shape, regions):
        return "chunks overlap, and others leave a gap"
    return None


def _is_tiled(shape: tuple[int, ...], regions: Sequence[Region]) -> bool:
    """Return whether rectangles inside of `shape` cover each element exactly once, in time linear in their number.

    Each coordinate has a random number. A rectangle counts the product over its dimensions of the one at its end
    minus the one at its start: a polynomial in which each corner has a term of its own. The sum over all equals
    that of the whole tensor when the inner corners cancel, which is a tiling; otherwise by a chance of 1 in 2**55.
    Comparing rectangles with each other would take the square of their number.
    """
    chance, sums = random.Random(), [0, 0]  # noqa: S311  (seeded by the system)
    numbers = [defaultdict[int, int](lambda: chance.getrandbits(61)) for _ in shape]
    for place, those in enumerate(([Region((0,) * len(shape), shape)], regions)):
        for offsets, sizes in those:
            product = 1
            for known, start, size in zip(numbers, offsets, sizes, strict=True):
                product = product * (known[start + size] - known[start]) % _PRIME
            sums[place] += product
    return (sums[0] - sums[1]) % _PRIME == 0


def intersect(one: Region, other: Region) -> Region | None:
    """Return the elements that both rectangles hold, or None."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = map(
        min,
        map(sum, zip(one.offsets, one.sizes, strict=True)),
        map(sum, zip(other.offsets, other.sizes, strict=True)),
    )
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Region(offsets, sizes) if all(size > 0 for size in sizes) else None


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Say whether elements laid out with `strides` follow each other in row-major order."""
    return all(
        size == 1 or stride == dense for size, stride, dense in zip(sizes, strides, row_major(sizes), strict=True)
    )


def flat_offset(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Return where element `offsets` of a row-major tensor of `shape` stands, in elements."""
    return sum(start * stride for start, stride in zip(offsets, row_major(shape), strict=True))


class ItemLocation(NamedTuple):
    """Where one item stands: a file of the checkpoint, a byte offset and a length in bytes."""

    file: str
    offset: int
    length: int


class ItemKey(NamedTuple):
    """What names one item: the entry it belongs to, and its chunk's offset when that is a tensor."""

    fqn: str
    offset: tuple[int, ...] | None


class Piece(NamedTuple):
    """One chunk on its way into the merged tensor."""

    region: Region  # the elements of the tensor that it holds
    place: ItemLocation
    file_offset: int  # where the item's data starts in its file, in bytes
    data_length: int  # bytes of the item's data
    strides: tuple[int, ...]  # how the elements are laid out there, in elements
    start: int  # the first element's place there, in elements
    crc: int | None  # CRC32 of the item's data, None when not known
    run: bool  # source and target are each one run of bytes, so that the kernel can copy it
    target: int  # where its first element goes, in bytes from the tensor's start
    nbytes: int  # bytes that it contributes
