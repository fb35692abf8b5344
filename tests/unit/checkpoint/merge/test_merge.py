"""Merging small checkpoints from end to end, without torch."""

import itertools
import json
import struct
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.merge.merge import MergeOptions, MergeProgress, merge, prepare_merge
from fsdplaunch.errors import CheckpointError, UsageError


def assert_merged(dcp, draft, output: Path) -> None:
    found = dcp.safetensors(output / "model.safetensors")
    assert {name: data for name, (_, _, data) in found.items()} == draft.expected


def test_merge_rows_gives_every_tensor_exactly(dcp, rows, tmp_path):
    checkpoint = rows.save(tmp_path / "ckpt")
    before = dcp.tree(checkpoint)
    result = merge(checkpoint, tmp_path / "out")
    assert_merged(dcp, rows, tmp_path / "out")
    found = dcp.safetensors(tmp_path / "out/model.safetensors")
    assert found["layer.weight"][:2] == ("F32", [6, 4])
    assert found["scale"][:2] == ("F32", [])
    assert found["none"] == ("F32", [0, 4], b"")
    assert dcp.tree(checkpoint) == before
    assert result.files == (tmp_path / "out/model.safetensors",)
    assert result.dtypes == {"float32": 3, "bfloat16": 1}
    assert result.skipped == ("model.step",)
    assert result.nbytes == (tmp_path / "out/model.safetensors").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]


def test_merge_twice_gives_the_same_bytes(dcp, rows, tmp_path):
    checkpoint = rows.save(tmp_path / "ckpt")
    merge(checkpoint, tmp_path / "one")
    merge(checkpoint, tmp_path / "two")
    assert dcp.tree(tmp_path / "one") == dcp.tree(tmp_path / "two")


def columns(*cuts: int, rows: int):
    edges = (0, *cuts)
    return [((0, a), (rows, b - a)) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"])
def test_merge_column_shards_and_rectangles(dcp, dtype, tmp_path):
    draft = dcp.Draft()
    draft.add("columns", (7, 9), columns(2, 5, 9, rows=7), dtype=dtype)
    grid = [((a, b), (2, 3)) for a in (0, 2) for b in (0, 3)]
    draft.add("grid", (4, 6), grid, dtype=dtype)
    draft.add("cube", (3, 4, 5), [((0, 0, 0), (3, 2, 5)), ((0, 2, 0), (3, 2, 5))], dtype=dtype)
    merge(draft.save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(verify=True))
    assert_merged(dcp, draft, tmp_path / "out")


def test_merge_transposed_storage_is_put_in_row_order(dcp, tmp_path):
    def transposed(part: bytes, sizes: tuple[int, ...]) -> bytes:
        n, m = sizes
        stored = b"".join(part[4 * (i * m + j) :][:4] for j in range(m) for i in range(n))
        return dcp.zipped(dcp.described("float32", sizes, (1, n)), stored)

    draft = dcp.Draft().add("w", (6, 4), [((0, 0), (3, 4)), ((3, 0), (3, 4))], item=transposed)
    merge(draft.save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(verify=True))
    assert_merged(dcp, draft, tmp_path / "out")


def test_merge_resolves_conjugated_and_negated_values(dcp, tmp_path):
    numbers = struct.pack("<8f", *(at - 3.5 for at in range(8)))
    draft = dcp.Draft()
    for name, flags in (("conj", {"conj": True}), ("neg", {"neg": True})):
        item = lambda part, sizes, flags=flags: dcp.zipped(dcp.described("complex64", sizes, flags=flags), part)  # noqa: E731
        draft.add(name, (4,), [((0,), (2,)), ((2,), (2,))], dtype="complex64", data=numbers, item=item)
    merge(draft.save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(verify=True))
    found = dcp.safetensors(tmp_path / "out/model.safetensors")
    values = [at - 3.5 for at in range(8)]
    assert list(struct.unpack("<8f", found["neg"][2])) == [-value for value in values]
    assert list(struct.unpack("<8f", found["conj"][2])) == [
        v if at % 2 == 0 else -v for at, v in enumerate(values)
    ]


def test_merge_of_negated_integers_is_refused(dcp, tmp_path):
    item = lambda part, sizes: dcp.zipped(dcp.described("int64", sizes, flags={"neg": True}), part)  # noqa: E731
    draft = dcp.Draft().add("w", (4,), dtype="int64", data=bytes(32), item=item)
    with pytest.raises(CheckpointError, match=r"'model.w' is int64 and marked as conjugated or negated"):
        merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")


@pytest.mark.parametrize(("dtype", "sizes"), [("int64", (2, 2)), ("float32", (4, 2)), ("float32", (8,))])
def test_merge_of_an_item_that_differs_from_the_index_is_refused(dcp, dtype, sizes, tmp_path):
    draft = dcp.Draft().add("w", (2, 4), item=lambda part, _: dcp.zipped(dcp.described(dtype, sizes), part))
    with pytest.raises(
        CheckpointError, match=r"holds \w+ of shape \[.*\], the index says float32 of shape \[2, 4\]"
    ):
        merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")


def test_merge_view_with_an_offset_takes_only_its_elements(dcp, tmp_path):
    def padded(part: bytes, sizes: tuple[int, ...]) -> bytes:
        return dcp.zipped(dcp.described("float32", sizes, start=3), b"\xff" * 12 + part + b"\xee" * 8)

    draft = dcp.Draft().add("w", (4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))], item=padded)
    merge(draft.save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(verify=True))
    assert_merged(dcp, draft, tmp_path / "out")


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
    checkpoint = draft.save(tmp_path / "ckpt")
    result = merge(checkpoint, tmp_path / "out")
    assert sorted(dcp.safetensors(tmp_path / "out/model.safetensors")) == ["block.w", "head.w"]
    assert ("module.head._fsdp_wrapped_module.w", "head.w") in result.renamed
    merge(checkpoint, tmp_path / "kept", options=MergeOptions(strip_wrappers=False))
    assert sorted(dcp.safetensors(tmp_path / "kept/model.safetensors")) == sorted(draft.expected)


def test_merge_names_that_would_meet_are_refused(dcp, tmp_path):
    draft = dcp.Draft().add("block.w", (2,)).add("_orig_mod.block.w", (2,))
    with pytest.raises(
        CheckpointError, match=r"'model.block.w' and 'model._orig_mod.block.w' would both be called"
    ):
        merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")


def test_merge_of_a_submodule_called_module_keeps_its_name(dcp, tmp_path):
    draft = dcp.Draft().add("module.w", (2,)).add("head.w", (2,))
    merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")
    assert_merged(dcp, draft, tmp_path / "out")


def test_merge_leaves_the_optimizer_out_and_says_so(dcp, tmp_path):
    draft = dcp.Draft().add("w", (2,))
    weights = dict(draft.expected)
    draft.add("state.w.exp_avg", (2,), top="optimizer")
    result = merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")
    assert result.skipped == ("optimizer.state.w.exp_avg",)
    assert list(dcp.safetensors(tmp_path / "out/model.safetensors")) == list(weights)


def test_merge_flat_checkpoint_keeps_its_names(dcp, tmp_path):
    draft = dcp.Draft().add("layers.0.w", (2,), top="").add("layers.1.w", (2,), top="")
    merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")
    assert_merged(dcp, draft, tmp_path / "out")


def test_merge_without_key_paths_uses_the_names(dcp, tmp_path):
    draft = dcp.Draft().add("layers.0.w", (2,), top="")
    draft.extra["planner_data"] = None
    merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")
    assert_merged(dcp, draft, tmp_path / "out")


def test_merge_reports_progress_to_the_last_byte(dcp, rows, tmp_path):
    seen: list[MergeProgress] = []
    merge(rows.save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(verify=True), progress=seen.append)
    total = sum(map(len, rows.expected.values()))
    assert {step.total for step in seen} == {total}
    assert [max(step.done for step in seen if step.phase == phase) for phase in ("copy", "verify")] == [total] * 2
    assert [step.phase for step in seen] == sorted(step.phase for step in seen)


def test_prepare_gives_the_plan_as_plain_data_and_writes_nothing(dcp, rows, tmp_path):
    checkpoint = rows.save(tmp_path / "ckpt")
    data = prepare_merge(checkpoint, output=tmp_path / "out").to_dict()
    json.dumps(data)
    assert data["source"] == str(checkpoint)
    assert data["skipped"] == ["model.step"]
    (file,) = data["files"]
    weight = next(tensor for tensor in file["tensors"] if tensor["name"] == "layer.weight")
    for copy in weight["copies"]:
        raw = (checkpoint / copy["file"]).read_bytes()[copy["offset"] :][: copy["length"]]
        assert raw == rows.expected["layer.weight"][copy["target"] :][: copy["length"]]
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_merge_plan_and_file_agree_on_every_offset(dcp, rows, tmp_path):
    checkpoint = rows.save(tmp_path / "ckpt")
    plan = prepare_merge(checkpoint).plan
    merge(checkpoint, tmp_path / "out")
    raw = (tmp_path / "out/model.safetensors").read_bytes()
    assert len(raw) == plan.nbytes
    for tensor in plan.tensors:
        assert raw[tensor.offset : tensor.offset + tensor.nbytes] == rows.expected[tensor.name]


def test_merge_with_removal_deletes_only_the_checkpoint(dcp, tmp_path):
    draft = dcp.Draft().add("w", (4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))])
    checkpoint = draft.save(tmp_path / "run/pytorch_model_fsdp_0")
    (tmp_path / "run/optimizer.bin").write_bytes(b"keep")
    result = merge(tmp_path / "run", tmp_path / "out", options=MergeOptions(remove_checkpoint_dir=True))
    assert (result.verified, result.removed) == (True, True)
    assert not checkpoint.exists()
    assert dcp.tree(tmp_path / "run") == {"optimizer.bin": b"keep"}
    assert_merged(dcp, draft, tmp_path / "out")


def test_merge_with_removal_keeps_other_files_in_the_folder(dcp, tmp_path):
    draft = dcp.Draft().add("w", (4,))
    checkpoint = draft.save(tmp_path / "ckpt")
    (checkpoint / "notes.txt").write_text("mine")
    result = merge(checkpoint, tmp_path / "out", options=MergeOptions(remove_checkpoint_dir=True))
    assert not result.removed
    assert dcp.tree(checkpoint) == {"notes.txt": b"mine"}


def test_merge_with_removal_of_more_than_weights_is_refused(dcp, rows, tmp_path):
    checkpoint = rows.save(tmp_path / "ckpt")
    before = dcp.tree(checkpoint)
    with pytest.raises(UsageError, match=r"1 entries that are not weights and would be lost: 'model.step'"):
        merge(checkpoint, tmp_path / "out", options=MergeOptions(remove_checkpoint_dir=True))
    assert dcp.tree(checkpoint) == before
    assert not (tmp_path / "out").exists()


def test_merge_with_removal_of_a_damaged_checkpoint_keeps_it(dcp, tmp_path):
    draft = dcp.Draft().add("w", (64,))
    name, content = next(iter(draft.files.items()))
    place = content.index(draft.expected["w"][:32])
    draft.files[name] = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    checkpoint = draft.save(tmp_path / "ckpt")
    before = dcp.tree(checkpoint)
    with pytest.raises(CheckpointError, match=r"the bytes of 'model.w' at \d+ do not match their checksum"):
        merge(checkpoint, tmp_path / "out", options=MergeOptions(remove_checkpoint_dir=True))
    assert dcp.tree(checkpoint) == before
    assert dcp.names(tmp_path) == ["ckpt"]


def test_merge_verify_without_stored_checksums_still_compares(dcp, tmp_path):
    draft = dcp.Draft().add("w", (8, 2), [((0, 0), (4, 2)), ((4, 0), (4, 2))], crc=False)
    assert merge(draft.save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(verify=True)).verified
    assert_merged(dcp, draft, tmp_path / "out")


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError, match="removed only after a merge of the weights"):
        MergeOptions(optimizer=True, remove_checkpoint_dir=True)
    with pytest.raises(UsageError, match="at least 1 byte, got 0"):
        MergeOptions(max_shard_size=0)


def test_weights_beside_an_optimizer_and_the_state_of_the_training_are_taken_alone(dcp, tmp_path):
    draft = dcp.Draft().add("tok_embeddings.weight", (4, 2), top="").add("layers.0.w", (3,), top="")
    draft.add("state.layers.0.w.exp_avg", (3,), top="optimizer").add("step", (), top="train_state", dtype="int64")
    result = merge(draft.save(tmp_path / "ckpt"), tmp_path / "out")
    found = dcp.safetensors(tmp_path / "out/model.safetensors")
    assert sorted(found) == ["layers.0.w", "tok_embeddings.weight"]
    assert set(result.skipped) == {"optimizer.state.layers.0.w.exp_avg", "train_state.step"}


@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_only_what_was_merged_is_removed(dcp, tmp_path, how):
    draft = dcp.Draft().add("w", (4,))
    checkpoint, other = draft.save(tmp_path / "ckpt"), draft.save(tmp_path / "other")
    left = dcp.tree(other)

    def save_again(_):
        if how == "replaced" and other.exists():
            checkpoint.rename(tmp_path / "old")
            other.rename(checkpoint)
        elif how == "rewritten":
            (checkpoint / ".metadata").write_bytes((other / ".metadata").read_bytes())

    try:
        merge(checkpoint, tmp_path / "out", options=MergeOptions(remove_checkpoint_dir=True), announce=save_again)
    except CheckpointError as problem:
        assert "was changed after it was merged" in problem.message or "changed while" in problem.message
    assert dcp.tree(checkpoint) == left
