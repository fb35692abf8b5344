"""Merging small checkpoints from end to end, without torch."""

import itertools
import json

import pytest

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, prepare_merge
from fsdplaunch.errors import CheckpointError, UsageError


def test_merge_rows_gives_every_tensor_exactly(dcp, rows, tmp_path):
    checkpoint = rows.save(tmp_path / "ckpt")
    before, plan = dcp.tree(checkpoint), prepare_merge(checkpoint, output=tmp_path / "out")
    data = plan.to_dict()
    json.dumps(data)
    assert (data["source"], data["skipped"]) == (str(checkpoint), ["model.step"])
    assert dcp.names(tmp_path) == ["ckpt"]
    result = rows.merged(tmp_path)
    raw = (tmp_path / "out/model.safetensors").read_bytes()
    for tensor in data["files"][0]["tensors"]:
        assert raw[tensor["offset"] :][: tensor["bytes"]] == rows.expected[tensor["name"]]
    found = dcp.safetensors(tmp_path / "out/model.safetensors")
    assert found["layer.weight"][:2] == ("F32", [6, 4])
    assert found["scale"][:2] == ("F32", [])
    assert found["none"] == ("F32", [0, 4], b"")
    assert dcp.tree(checkpoint) == before
    assert result.files == (tmp_path / "out/model.safetensors",)
    assert result.dtypes == {"float32": 3, "bfloat16": 1}
    assert result.skipped == ("model.step",)
    assert result.nbytes == plan.plan.nbytes == len(raw)
    merge(checkpoint, tmp_path / "again")
    assert dcp.tree(tmp_path / "again") == dcp.tree(tmp_path / "out")
    assert dcp.names(tmp_path) == ["again", "ckpt", "out"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"])
def test_merge_column_shards_and_rectangles(dcp, dtype, tmp_path):
    draft = dcp.Draft()
    columns = [((0, a), (7, b - a)) for a, b in itertools.pairwise((0, 2, 5, 9))]
    draft.add("columns", (7, 9), columns, dtype=dtype)
    draft.add("grid", (4, 6), [((a, b), (2, 3)) for a in (0, 2) for b in (0, 3)], dtype=dtype)
    draft.add("cube", (3, 4, 5), [((0, 0, 0), (3, 2, 5)), ((0, 2, 0), (3, 2, 5))], dtype=dtype)
    draft.merged(tmp_path, verify=True)


def test_merge_puts_transposed_and_padded_storages_in_order(dcp, tmp_path):
    def transposed(part: bytes, sizes: tuple[int, ...]) -> bytes:
        n, m = sizes
        stored = b"".join(part[4 * (i * m + j) :][:4] for j in range(m) for i in range(n))
        return dcp.zipped(dcp.described("float32", sizes, (1, n)), stored)

    def padded(part: bytes, sizes: tuple[int, ...]) -> bytes:
        return dcp.zipped(dcp.described("float32", sizes, start=3), b"\xff" * 12 + part + b"\xee" * 8)

    halves = [((0, 0), (3, 4)), ((3, 0), (3, 4))]
    draft = dcp.Draft().add("turned", (6, 4), halves, item=transposed).add("view", (6, 4), halves, item=padded)
    draft.merged(tmp_path, verify=True)


def test_merge_of_conjugated_or_negated_values_is_refused(dcp, tmp_path):
    for name, flags in (("a", {"conj": True}), ("b", {"neg": True})):
        item = lambda part, sizes, flags=flags: dcp.zipped(dcp.described("complex64", sizes, flags=flags), part)  # noqa: E731
        draft = dcp.Draft().add("w", (4,), dtype="complex64", item=item)
        with pytest.raises(CheckpointError, match=r"'model.w' .* the conjugate or the negative of the values"):
            merge(draft.save(tmp_path / name), tmp_path / "out")


@pytest.mark.parametrize(("dtype", "sizes"), [("int64", (2, 2)), ("float32", (4, 2)), ("float32", (8,))])
def test_merge_of_an_item_that_differs_from_the_index_is_refused(dcp, dtype, sizes, tmp_path):
    draft = dcp.Draft().add("w", (2, 4), item=lambda part, _: dcp.zipped(dcp.described(dtype, sizes), part))
    message = r"holds \w+ of shape \[.*\], the index says float32 of shape \[2, 4\]"
    with pytest.raises(CheckpointError, match=message):
        merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")


def test_merge_large_model_becomes_several_files_with_an_index(dcp, tmp_path):
    draft = dcp.Draft()
    for number in range(5):
        draft.add(f"w{number}", (10, 10))
    options = MergeOptions(max_shard_size=900, verify=True)
    result = merge(draft.save(tmp_path / "ckpt"), tmp_path / "out", options=options)
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [path.name for path in result.files] == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2000}
    for name, file in index["weight_map"].items():
        assert dcp.safetensors(tmp_path / "out" / file)[name][2] == draft.expected[name]
    assert sorted(index["weight_map"]) == [f"w{n}" for n in range(5)]


def test_merge_strips_wrappers_from_names(dcp, tmp_path):
    draft = dcp.Draft()
    draft.add("module._orig_mod.block._checkpoint_wrapped_module.w", (2,))
    draft.add("module.head._fsdp_wrapped_module.w", (2,))
    result = merge(draft.save(tmp_path / "ckpt"), tmp_path / "stripped")
    assert sorted(dcp.safetensors(tmp_path / "stripped/model.safetensors")) == ["block.w", "head.w"]
    assert ("module.head._fsdp_wrapped_module.w", "head.w") in result.renamed
    draft = dcp.Draft().add("block.w", (2,)).add("_orig_mod.block.w", (2,))
    with pytest.raises(CheckpointError, match=r"'model.block.w' and 'model._orig_mod.block.w' would both"):
        merge(draft.save(tmp_path / "meet"), tmp_path / "neither")


def test_merge_flat_checkpoint_with_or_without_key_paths_keeps_its_names(dcp, tmp_path):
    draft = dcp.Draft().add("layers.0.w", (2,), top="").add("layers.1.w", (2,), top="")
    draft.merged(tmp_path / "with")
    draft.extra["planner_data"] = None
    draft.merged(tmp_path / "without")


def test_merge_leaves_the_optimizer_and_the_state_of_the_training_out_and_says_so(dcp, tmp_path):
    for number, top in enumerate(("model", "")):
        draft = dcp.Draft().add("tok_embeddings.weight", (4, 2), top=top).add("layers.0.w", (3,), top=top)
        wanted = sorted(draft.expected)
        draft.add("state.layers.0.w.exp_avg", (3,), top="optimizer")
        draft.add("step", (), top="train_state", dtype="int64")
        result = merge(draft.save(tmp_path / f"ckpt{number}"), tmp_path / f"out{number}")
        assert sorted(dcp.safetensors(tmp_path / f"out{number}/model.safetensors")) == wanted
        assert set(result.skipped) == {"optimizer.state.layers.0.w.exp_avg", "train_state.step"}


def test_merge_reports_progress_to_the_last_byte(dcp, rows, tmp_path):
    seen = []
    follow = lambda *now: seen.append(now)  # noqa: E731
    merge(rows.save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(verify=True), progress=follow)
    total = sum(map(len, rows.expected.values()))
    assert {step[2] for step in seen} == {total}
    assert [max(step[1] for step in seen if step[0] == phase) for phase in ("copy", "verify")] == [total] * 2
    assert [step[0] for step in seen] == sorted(step[0] for step in seen)


def test_merge_with_removal_deletes_only_the_checkpoint(dcp, tmp_path):
    draft = dcp.Draft().add("w", (4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))])
    checkpoint = draft.save(tmp_path / "run/pytorch_model_fsdp_0")
    (tmp_path / "run/optimizer.bin").write_bytes(b"keep")
    result = merge(tmp_path / "run", tmp_path / "out", options=MergeOptions(remove_checkpoint_dir=True))
    assert (result.verified, result.removed) == (True, True)
    assert not checkpoint.exists()
    assert dcp.tree(tmp_path / "run") == {"optimizer.bin": b"keep"}
    draft.save(tmp_path / "ckpt")
    (tmp_path / "ckpt/notes.txt").write_text("mine")
    assert not draft.merged(tmp_path, remove_checkpoint_dir=True, overwrite=True).removed
    assert dcp.tree(tmp_path / "ckpt") == {"notes.txt": b"mine"}


@pytest.mark.parametrize("kind", ["value", "excluded", "damaged"])
def test_merge_with_removal_of_what_would_be_lost_keeps_it(dcp, kind, tmp_path):
    draft, options = dcp.Draft().add("w", (64,)).add("v", (4,)), {"remove_checkpoint_dir": True}
    if kind == "value":
        draft.add_value("step")
        message = "1 entries that are not merged and would be lost: 'model.step'"
    elif kind == "excluded":
        options["exclude"] = ("v",)
        message = "1 entries that are not merged and would be lost: 'model.v'"
    else:
        (name,) = draft.files
        draft.files[name] = draft.files[name].replace(draft.expected["w"][:32], bytes(32))
        message = r"the bytes of 'model.w' at \d+ do not match their checksum"
    checkpoint = draft.save(tmp_path / "ckpt")
    before = dcp.tree(checkpoint)
    with pytest.raises((CheckpointError, UsageError), match=message):
        merge(checkpoint, tmp_path / "out", options=MergeOptions(**options))
    assert dcp.tree(checkpoint) == before
    assert dcp.names(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_only_what_was_merged_is_removed(dcp, tmp_path, how):
    draft = dcp.Draft().add("w", (4,))
    checkpoint, other = draft.save(tmp_path / "ckpt"), draft.save(tmp_path / "other")
    left = dcp.tree(other)

    def save_again(*_):
        if how == "replaced" and other.exists():
            checkpoint.rename(tmp_path / "old")
            other.rename(checkpoint)
        elif how == "rewritten":
            (checkpoint / ".metadata").write_bytes((other / ".metadata").read_bytes())

    try:
        merge(checkpoint, tmp_path / "out", options=MergeOptions(remove_checkpoint_dir=True), progress=save_again)
    except CheckpointError as problem:
        assert "changed after the merge" in problem.message or "changed while" in problem.message
    assert dcp.tree(checkpoint) == left


def test_removal_leaves_what_came_into_the_folder_meanwhile(dcp, tmp_path):
    draft = dcp.Draft().add("w", (4,))
    checkpoint = draft.save(tmp_path / "ckpt")
    (checkpoint / "__7_0.distcp").touch()  # of a rank that had nothing to write

    def come(*_):
        (checkpoint / "__9_0.distcp").write_text("another save's")

    options = MergeOptions(remove_checkpoint_dir=True)
    assert not merge(checkpoint, tmp_path / "out", options=options, progress=come).removed
    assert dcp.names(checkpoint) == ["__9_0.distcp"]


NAMES = ["embed.weight", "layers.1.up.weight", "layers.10.up.weight", "layers.10.up.bias", "head.weight"]


@pytest.fixture
def model(dcp):
    draft = dcp.Draft()
    for name in NAMES:
        draft.add(name, (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))])
    return draft


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"only": ("layers.1",)}, {NAMES[1]: NAMES[1]}),
        ({"only": ("layers.1.",)}, {NAMES[1]: NAMES[1]}),
        ({"only": ("*.weight",), "exclude": ("layers.?.*",)}, {NAMES[at]: NAMES[at] for at in (0, 2, 4)}),
        ({"exclude": ("layers.1[0]*",)}, {NAMES[at]: NAMES[at] for at in (0, 1, 4)}),
        ({"only": ("head",), "rename": (("head.", ""),)}, {"weight": NAMES[4]}),
        (
            {"rename": (("layers.10", "last"), ("layers", "model.layers"), ("", "net"))},
            {
                "net.embed.weight": NAMES[0],
                "model.layers.1.up.weight": NAMES[1],
                "last.up.weight": NAMES[2],
                "last.up.bias": NAMES[3],
                "net.head.weight": NAMES[4],
            },
        ),
        (
            {"only": ("layers", "head"), "exclude": ("*.bias",), "rename": (("layers", "h"),)},
            {"h.1.up.weight": NAMES[1], "h.10.up.weight": NAMES[2], "head.weight": NAMES[4]},
        ),
    ],
)
def test_chosen_weights_are_merged_and_the_rest_is_named(dcp, model, options, left, tmp_path):
    result = merge(model.save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(**options, verify=True))
    found = dcp.safetensors(tmp_path / "out/model.safetensors")
    assert {name: data for name, (_, _, data) in found.items()} == {
        new: model.expected[old] for new, old in left.items()
    }
    assert set(result.excluded) == {f"model.{name}" for name in set(NAMES) - set(left.values())}
    assert dict(result.renamed) == {old: new for new, old in left.items() if old != new}
    assert result.skipped == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ("layer",)}, "--only 'layer' matches none of the 5 weights"),
        ({"exclude": ("*.bias", "*.gain")}, r"--exclude '\*.gain' matches none"),
        ({"only": ("head",), "exclude": ("*.weight",)}, "select none of the 5 weights"),
        ({"rename": (("lay", "x"),)}, "--rename lay=x matches none"),
        ({"rename": (("head.weight", ""),)}, "would make the name 'head.weight' empty"),
        ({"rename": (("layers.1", "layers.10"),)}, r"would both be called 'layers.10.up.weight'"),
    ],
)
def test_choice_that_cannot_be_made_is_refused(dcp, model, options, message, tmp_path):
    with pytest.raises((UsageError, CheckpointError), match=message) as caught:
        merge(model.save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(**options))
    assert caught.value.hint
    assert dcp.names(tmp_path) == ["ckpt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"safe_serialization": False, **one}, f"{next(iter(one))} works only in a merge to safetensors")
            for one in ({"only": ("a",)}, {"exclude": ("a",)}, {"rename": (("a", "b"),)}, {"dtype": "bf16"})
        ),
        ({"dtype": "int8"}, "dtype 'int8' is not known"),
        ({"max_shard_size": 0}, "at least 1 byte, got 0"),
        ({"checksums": False, "verify": True}, "verifying a merge needs the checksums"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        MergeOptions(**options)


def test_prepare_names_both_element_types_and_the_smaller_size(model, tmp_path):
    checkpoint = model.save(tmp_path / "ckpt")
    plan = prepare_merge(checkpoint, MergeOptions(dtype="bf16")).plan
    assert plan.tensor_bytes * 2 == prepare_merge(checkpoint).plan.tensor_bytes
    data = plan.to_dict()["files"][0]["tensors"][0]
    assert (data["dtype"], data["stored_dtype"], data["bytes"]) == ("BF16", "float32", 16)
