"""The plan as pure data: any shape, any cutting, any strides, any file size; and what it must never do."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdplaunch.checkpoint.chunks import ItemLocation, Region, find_tiling_fault, row_major
from fsdplaunch.checkpoint.dtypes import DTYPES
from fsdplaunch.checkpoint.merge.plan import build_plan
from fsdplaunch.checkpoint.merge.weight_names import Selection, final_names, select_weights
from fsdplaunch.checkpoint.merge.write import blocks_of, gather_block
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, StoredChunk, StoredTensor
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription
from fsdplaunch.errors import CheckpointError

STORABLE = sorted(name for name, dtype in DTYPES.items() if dtype.code)


@st.composite
def cuttings(draw, shape):
    """Rectangles that tile a shape: cut in two again and again along drawn dimensions."""
    boxes = [Region((0,) * len(shape), tuple(shape))] if math.prod(shape) else []
    for _ in range(draw(st.integers(0, 5))):
        candidates = [(n, d) for n, box in enumerate(boxes) for d, size in enumerate(box.sizes) if size > 1]
        if not candidates:
            break
        number, dim = draw(st.sampled_from(candidates))
        offsets, sizes = boxes.pop(number)
        at = draw(st.integers(1, sizes[dim] - 1))
        boxes.append(Region(offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        start = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes.append(Region(start, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return boxes


@st.composite
def layouts(draw, sizes):
    """Strides and a start that put each element of a rectangle somewhere else: permuted, padded, shifted."""
    order = draw(st.permutations(range(len(sizes))))
    strides, step = [0] * len(sizes), 1
    for dim in order:
        strides[dim] = step
        step *= sizes[dim] + draw(st.integers(0, 2))
    return tuple(strides), draw(st.integers(0, 3))


@st.composite
def tensors(draw, number=0):
    """A stored tensor, its items, and its bytes in each item's storage."""
    dtype = DTYPES[draw(st.sampled_from(STORABLE))]
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    chunks, items, storages = [], {}, {}
    for at, box in enumerate(draw(cuttings(shape))):
        strides, start = draw(layouts(box.sizes)) if draw(st.booleans()) else (row_major(box.sizes), 0)
        place = ItemLocation(f"__{at % 3}_0.distcp", 10_000 * (100 * number + at), 5000)
        length = (start + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True)) + 1) * dtype.size
        items[place] = TorchZipItem(TensorDescription(dtype, box.sizes, strides, start, "0"), 64, length, None)
        storages[place] = scattered(box, shape, strides, start, dtype.size, length)
        chunks.append(StoredChunk(box, place))
    chunks.sort(key=lambda chunk: chunk.region)
    return StoredTensor(f"model.t{number}", ("model", f"t{number}"), dtype, shape, tuple(chunks)), items, storages


def element(at: int, size: int) -> bytes:
    """The bytes of element `at` of a tensor: distinct for each place."""
    return (at * 2654435761 % 2 ** (8 * size)).to_bytes(size, "little")


def scattered(box: Region, shape, strides, start: int, size: int, length: int) -> bytes:
    storage = bytearray(b"\xaa" * length)
    whole = row_major(shape)
    for inside in itertools.product(*map(range, box.sizes)):
        value = sum((i + o) * s for i, o, s in zip(inside, box.offsets, whole, strict=True))
        place = (start + sum(i * s for i, s in zip(inside, strides, strict=True))) * size
        storage[place : place + size] = element(value, size)
    return bytes(storage)


@st.composite
def models(draw):
    made = [draw(tensors(number)) for number in range(draw(st.integers(1, 4)))]
    items = {place: item for _, more, _ in made for place, item in more.items()}
    storages = {place: data for _, _, more in made for place, data in more.items()}
    return [tensor for tensor, _, _ in made], items, storages


def selected(stored) -> Selection:
    named = tuple((t.path[1], t) for t in stored)
    return Selection(root=("model",), tensors=named, plain=tuple(name for name, _ in named), skipped=())


@given(models(), st.integers(1, 3000))
@settings(max_examples=75, deadline=None)
def test_plan_places_every_byte_of_every_tensor_once_and_in_order(model, max_shard_size):
    stored, items, storages = model
    plan = build_plan(selected(stored), items, max_shard_size=max_shard_size)
    json.dumps(plan.to_dict())
    assert sorted(t.name for t in plan.tensors) == sorted(t.path[1] for t in stored)
    assert (plan.index is None) == (len(plan.files) == 1)
    for file in plan.files:
        place = len(file.header)
        assert place % 8 == 0
        ranks = [(-tensor.dtype.rank, tensor.name) for tensor in file.tensors]
        assert ranks == sorted(ranks)
        assert len(file.tensors) == 1 or sum(t.nbytes for t in file.tensors) <= max_shard_size
        for tensor in file.tensors:
            assert tensor.offset == place
            place += tensor.nbytes
            assert sum(piece.nbytes for piece in tensor.pieces) == tensor.nbytes
        assert place == file.nbytes
    for tensor in plan.tensors:
        assert_bytes(tensor, storages)


def assert_bytes(tensor, storages) -> None:
    """Both ways of carrying a plan out give each element at its place."""
    size = tensor.dtype.size
    wanted = b"".join(element(at, size) for at in range(math.prod(tensor.shape)))

    def read(piece, offset, count):
        data = storages[piece.place]
        assert 0 <= offset <= offset + count <= len(data)
        return data[offset : offset + count]

    if math.prod(tensor.shape):
        blocks = blocks_of(tensor.shape, size, limit=40)
        assert b"".join(bytes(gather_block(tensor, block, read)) for block in blocks) == wanted
    out = bytearray(tensor.nbytes)
    for piece in tensor.pieces:
        if piece.run:
            data = read(piece, piece.start * size, piece.nbytes)
            out[piece.target : piece.target + piece.nbytes] = data
    if tensor.in_runs:
        assert out == wanted


@given(st.data())
@settings(max_examples=75, deadline=None)
def test_tilings_are_accepted_and_spoilt_ones_are_not(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    boxes = data.draw(cuttings(shape))
    assert find_tiling_fault(shape, data.draw(st.permutations(boxes))) is None
    victim = data.draw(st.sampled_from(boxes))
    others = [box for box in boxes if box is not victim]
    assert find_tiling_fault(shape, others)
    assert find_tiling_fault(shape, [*boxes, victim])
    dim = data.draw(st.integers(0, len(shape) - 1))
    shift = data.draw(st.sampled_from([-1, 1]))
    moved = Region(tuple(o + shift * (d == dim) for d, o in enumerate(victim.offsets)), victim.sizes)
    if min(moved.offsets) >= 0:
        assert find_tiling_fault(shape, [*others, moved])


def test_many_chunks_that_form_no_grid_are_accepted_and_one_that_overlaps_is_not():
    """Comparing each with each would take minutes, and whoever does it has to refuse them."""
    rows = [Region((row, 0), (1, 8000)) for row in range(3000)]
    columns = [Region((3000, column), (3000, 1)) for column in range(8000)]
    assert find_tiling_fault((6000, 8000), [*rows, *columns]) is None
    columns[7], columns[9] = Region((2999, 7), (3001, 1)), Region((3001, 9), (2999, 1))
    assert find_tiling_fault((6000, 8000), [*rows, *columns]) == "chunks overlap, and others leave a gap"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a.w", "b.w"], ["a.w", "b.w"]),
        (["module.a.w", "module.b.w"], ["a.w", "b.w"]),
        (["module.module.w"], ["w"]),
        (["module.a.w", "b.w"], ["module.a.w", "b.w"]),
        (["_orig_mod.a._checkpoint_wrapped_module.w"], ["a.w"]),
        (["_fsdp_wrapped_module.module.a.w", "_fsdp_wrapped_module.module.b"], ["a.w", "b"]),
        (["module"], ["module"]),
        (["my_orig_mod.w"], ["my_orig_mod.w"]),
    ],
)
def test_final_names(names, wanted):
    assert final_names([(name,) for name in names]) == wanted


def tensor_at(path) -> StoredTensor:
    return StoredTensor(".".join(map(str, path)), path, DTYPES["float32"], (), ())


@pytest.mark.parametrize(
    ("paths", "root"),
    [
        ([("model", "a"), ("model", "b")], ("model",)),
        ([("net", "a"), ("net", "b")], ("net",)),
        ([("a",), ("b",)], ()),
        ([("a",)], ()),
        ([("model", "a"), ("optimizer", "state", "a", "exp_avg")], ("model",)),
        ([("model", "a"), ("ema", "a")], ("model",)),
        ([("app", "model", "a"), ("app", "optim", "state", "a")], ("app", "model")),
        ([("net", "a"), ("optim", "state", "a")], ("net",)),
        ([("generator", "a"), ("critic", "a")], ()),
        ([("model", "a"), ("rng",)], ("model",)),
    ],
)
def test_root_of_the_weights(paths, root):
    index = CheckpointIndex(tensors=tuple(map(tensor_at, paths)), values=())
    assert select_weights(index, where="ckpt").root == root


@pytest.mark.parametrize(
    "paths",
    [
        [("optimizer", "state", "a", "exp_avg")],
        [("optim", "a")],
        [("state", "a", "exp_avg"), ("param_groups", 0, "lr")],
        [("model", "state", "a"), ("model", "param_groups", 0, "lr")],
        [("generator", "a"), ("critic", "a"), ("optim", "state", "a")],
    ],
)
def test_optimizer_is_refused(paths):
    index = CheckpointIndex(tensors=tuple(map(tensor_at, paths)), values=())
    with pytest.raises(CheckpointError, match="optimizer") as caught:
        select_weights(index, where="ckpt")
    assert caught.value.hint
