"""Runs of elements as rectangles."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fsdplaunch.checkpoint.chunks import Region, find_tiling_fault, flat_offset, is_dense, row_major
from fsdplaunch.checkpoint.readers.xla_files import rectangles

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_rectangles_of_neighbouring_runs_tile_the_tensor(shape: tuple[int, ...], data: st.DataObject):
    whole = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, whole), max_size=4)))
    boxes: list[Region] = []
    for begin, end in zip([0, *cuts], [*cuts, whole], strict=True):
        at = begin
        for start, box in rectangles(shape, begin, end):
            assert start == at == flat_offset(shape, box.offsets)
            assert is_dense(box.sizes, row_major(shape))
            at += box.numel
            boxes.append(box)
        assert at == max(begin, end)
    assert find_tiling_fault(shape, boxes) is None


@given(SHAPES, st.data())
def test_run_is_few_rectangles(shape: tuple[int, ...], data: st.DataObject):
    begin = data.draw(st.integers(0, math.prod(shape)))
    end = data.draw(st.integers(begin, math.prod(shape)))
    assert len(list(rectangles(shape, begin, end))) <= max(1, 2 * len(shape) - 1)
