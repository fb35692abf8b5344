"""Choosing weights and renaming them."""

import pytest

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, prepare_merge
from fsdplaunch.checkpoint.merge.weight_names import pick, rename
from fsdplaunch.errors import CheckpointError, UsageError

NAMES = ["embed.weight", "layers.1.up.weight", "layers.10.up.weight", "layers.10.up.bias", "head.weight"]


@pytest.mark.parametrize(
    ("only", "exclude", "left"),
    [
        ([], [], NAMES),
        (["layers.1"], [], NAMES[1:2]),
        (["layers.1."], [], NAMES[1:2]),
        (["layers"], ["layers.10.up.bias"], NAMES[1:3]),
        (["*.weight"], ["layers.?.*"], [NAMES[0], NAMES[2], NAMES[4]]),
        (["head", "embed.weight"], [], [NAMES[0], NAMES[4]]),
        ([], ["layers.1[0]*"], [NAMES[0], NAMES[1], NAMES[4]]),
    ],
)
def test_pick_takes_patterns_and_leading_parts(only, exclude, left):
    wanted = pick(NAMES, only=only, exclude=exclude)
    assert [name for name, keep in zip(NAMES, wanted, strict=True) if keep] == left


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"only": ["layer"]}, "--only 'layer' fits none of the 5 weights"),
        ({"exclude": ["*.bias", "*.gain"]}, r"--exclude '\*.gain' fits none"),
        ({"only": ["head"], "exclude": ["*.weight"]}, "leave none of the 5 weights"),
    ],
)
def test_pick_of_nothing_is_refused(chosen, message):
    with pytest.raises(UsageError, match=message):
        pick(NAMES, **chosen)


def test_rename_replaces_leading_parts_once():
    pairs = [("layers.10", "last"), ("layers", "model.layers"), ("", "net")]
    assert rename(NAMES, pairs) == [
        "net.embed.weight",
        "model.layers.1.up.weight",
        "last.up.weight",
        "last.up.bias",
        "net.head.weight",
    ]
    assert rename(["model.head.weight"], [("model.", "")]) == ["head.weight"]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("lay", "x"), "--rename lay=x fits none"),
        (("head.weight", ""), "leaves nothing of the name 'head.weight'"),
    ],
)
def test_rename_that_cannot_be_done_is_refused(pair, message):
    with pytest.raises(UsageError, match=message):
        rename(NAMES, [pair])


@pytest.fixture
def model(dcp):
    draft = dcp.Draft()
    for name in NAMES:
        draft.add(name, (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))])
    return draft


def test_merge_of_chosen_weights_holds_them_and_names_the_rest(dcp, model, tmp_path):
    options = MergeOptions(only=("layers", "head"), exclude=("*.bias",), rename=(("layers", "h"),), verify=True)
    result = merge(model.save(tmp_path / "ckpt"), tmp_path / "out", options=options)
    found = dcp.safetensors(tmp_path / "out/model.safetensors")
    wanted = {"h.1.up.weight": NAMES[1], "h.10.up.weight": NAMES[2], "head.weight": NAMES[4]}
    assert {name: data for name, (_, _, data) in found.items()} == {
        new: model.expected[old] for new, old in wanted.items()
    }
    assert sorted(result.excluded) == ["model.embed.weight", "model.layers.10.up.bias"]
    assert (result.skipped, ("layers.1.up.weight", "h.1.up.weight") in result.renamed) == ((), True)


def test_merge_rename_onto_another_weight_is_refused(model, tmp_path):
    options = MergeOptions(rename=(("layers.1", "layers.10"),))
    with pytest.raises(CheckpointError, match=r"would both be called 'layers.10.up.weight'") as caught:
        merge(model.save(tmp_path / "ckpt"), tmp_path / "out", options=options)
    assert "rename to names" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_merge_of_chosen_weights_never_removes_the_checkpoint(dcp, model, tmp_path):
    checkpoint = model.save(tmp_path / "ckpt")
    before = dcp.tree(checkpoint)
    with pytest.raises(UsageError, match=r"also holds 1 weights that are left out: 'model.head.weight' would be"):
        merge(
            checkpoint,
            tmp_path / "out",
            options=MergeOptions(exclude=("head",), remove_checkpoint_dir=True),
        )
    assert dcp.tree(checkpoint) == before


@pytest.mark.parametrize(
    "option", [{"only": ("a",)}, {"exclude": ("a",)}, {"rename": (("a", "b"),)}, {"dtype": "bf16"}]
)
def test_options_of_safetensors_are_refused_in_the_torch_format(option):
    with pytest.raises(UsageError, match=f"{next(iter(option))} works only in a merge to safetensors"):
        MergeOptions(safe_serialization=False, **option)


def test_unknown_dtype_is_refused():
    with pytest.raises(UsageError, match="dtype 'int8' is not known"):
        MergeOptions(dtype="int8")


def test_prepare_names_both_element_types_and_the_smaller_size(model, tmp_path):
    checkpoint = model.save(tmp_path / "ckpt")
    plan = prepare_merge(checkpoint, MergeOptions(dtype="bf16")).plan
    assert plan.tensor_bytes * 2 == prepare_merge(checkpoint).plan.tensor_bytes
    data = plan.to_dict()["files"][0]["tensors"][0]
    assert (data["dtype"], data["stored_dtype"], data["bytes"]) == ("BF16", "float32", 16)
