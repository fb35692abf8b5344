"""Chunks of stored tensors: the rectangle that each covers, and where its bytes stand in a checkpoint's files."""

import math
from collections.abc import Sequence
from typing import NamedTuple

# Comparisons of one tensor's rectangles with each other.
_MAX_COMPARED = 300_000


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
    return _find_overlap(regions, len(shape)) if len(regions) > 1 else None


def _find_overlap(regions: Sequence[Region], dims: int) -> str | None:
    """Compare each region with those before it that reach as far, along the dimension that separates most."""
    dim = max(range(dims), key=lambda at: len({region.offsets[at] for region in regions}))
    near: list[Region] = []
    compared = 0
    for region in sorted(regions, key=lambda region: region.offsets[dim]):
        near = [one for one in near if one.offsets[dim] + one.sizes[dim] > region.offsets[dim]]
        compared += len(near)
        if compared > _MAX_COMPARED:
            return f"its {len(regions)} chunks do not form a grid"
        for one in near:
            spans = zip(one.offsets, one.sizes, region.offsets, region.sizes, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in spans):
                return f"chunks at {list(one.offsets)} and {list(region.offsets)} overlap"
        near.append(region)
    return None


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
