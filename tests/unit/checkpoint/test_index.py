"""Reading `.metadata` of every torch version, from what each is known to write."""

import pytest

from fsdplaunch.checkpoint.boxes import Box
from fsdplaunch.checkpoint.index import parse_index, read_index
from fsdplaunch.checkpoint.merge import merge
from fsdplaunch.errors import CheckpointError

SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"


def properties_of(draft, name):
    return draft.entries[name].state["properties"]


def test_index_gives_tensors_values_and_files(dcp, rows):
    index = parse_index(rows.index(), where="it")
    weight = next(tensor for tensor in index.tensors if tensor.name == "model.layer.weight")
    assert (weight.path, weight.dtype.name, weight.shape, weight.nbytes) == (
        ("model", "layer.weight"),
        "float32",
        (6, 4),
        96,
    )
    assert [chunk.box for chunk in weight.chunks] == [Box((0, 0), (3, 4)), Box((3, 0), (3, 4))]
    assert [value.name for value in index.values] == ["model.step"]
    assert index.files == {name: len(content) for name, content in rows.files.items()}


def test_index_of_torch_2_1_names_other_classes(dcp, tmp_path):
    draft = dcp.Draft().add("w", (4,))
    properties = properties_of(draft, "model.w")
    properties.cls = dcp.Named(SHARDED_TENSOR, "TensorProperties")
    memory = dcp.Called(dcp.Named(SHARDED_TENSOR, "MEM_FORMAT_ENCODING"), (0,))
    properties.state = (*properties.state[:3], memory, properties.state[4])
    state = draft.metadata()
    del state.state["storage_meta"], state.state["version"]
    index = parse_index(dcp.dumps(state), where="it")
    assert index.tensors[0].dtype.name == "float32"


def test_index_of_torch_2_15_has_strides_in_its_properties(dcp):
    draft = dcp.Draft().add("w", (4, 2))
    properties = properties_of(draft, "model.w")
    properties.state = (*properties.state, (1, 4))
    assert parse_index(draft.index(), where="it").tensors[0].shape == (4, 2)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("cls", ["PosixPath", "WindowsPath"])
def test_index_with_the_path_it_was_saved_at_is_read(dcp, module, cls):
    draft = dcp.Draft().add("w", (4,))
    path = dcp.Called(dcp.Named(module, cls), ("/", "scratch", "me"))
    meta = {"checkpoint_id": path, "save_id": "0", "load_id": None, "modules": []}
    draft.extra["storage_meta"] = dcp.Made(dcp.Named(dcp.METADATA, "StorageMeta"), meta)
    assert parse_index(draft.index(), where="it").tensors


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_index_of_each_pickle_protocol_is_read(dcp, rows, protocol):
    assert len(parse_index(dcp.dumps(rows.metadata(), protocol), where="it").tensors) == 4


def test_chunks_of_size_zero_need_no_bytes(dcp, tmp_path):
    draft = dcp.Draft().add("w", (2, 3), [((0, 0), (1, 3)), ((1, 0), (1, 3))])
    entry = dcp.tensor_entry(
        "float32", (2, 3), [((2, 0), (0, 3)), ((0, 0), (1, 3)), ((1, 0), (1, 3)), ((2, 0), (0, 3))]
    )
    draft.entries["model.w"] = entry
    merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")
    assert dcp.safetensors(tmp_path / "out/model.safetensors")["w"][2] == draft.expected["w"]


def test_chunks_in_any_order_are_sorted(dcp):
    draft = dcp.Draft().add("w", (6,), [((4,), (2,)), ((0,), (2,)), ((2,), (2,))])
    chunks = parse_index(draft.index(), where="it").tensors[0].chunks
    assert [chunk.box.offsets for chunk in chunks] == [(0,), (2,), (4,)]


def test_index_without_tensors_is_said_by_the_merge(dcp, tmp_path):
    folder = dcp.Draft().add_value("step").save(tmp_path / "ckpt")
    assert read_index(folder).tensors == ()
    with pytest.raises(CheckpointError, match="holds no tensor"):
        merge(folder, tmp_path / "out")


def test_entry_without_a_path_is_refused_when_others_have_one(dcp):
    draft = dcp.Draft().add("w", (4,)).add("v", (4,))
    del draft.planner["model.w"]
    with pytest.raises(CheckpointError, match="the path of 'model.w' is not a list of keys"):
        parse_index(draft.index(), where="it")
