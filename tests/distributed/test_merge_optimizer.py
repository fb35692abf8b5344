"""Merging an optimizer's checkpoint, against the state that torch gathers and loads."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from fsdplaunch.checkpoint.readers.open import AmbiguousError
from fsdplaunch.errors import CheckpointError, UsageError

OPTIMIZER = MergeOptions(optimizer=True)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of two parameter groups after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.1, "weight_decay": 0.0},
        {"params": list(model[1].parameters()), "lr": 0.2, "betas": (0.5, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, *, flat: bool, top: str | None = "optimizer") -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({top: state} if top else state, checkpoint_id=folder, no_dist=True)
    return model, optimizer


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("top", ["optimizer", None])
def test_merged_optimizer_is_loaded_by_torch_with_the_same_state(flat, top, tmp_path):
    model, optimizer = save(tmp_path / "run/optimizer_0", flat=flat, top=top)
    result = merge(tmp_path / "run", tmp_path / "out", options=OPTIMIZER)
    assert [path.name for path in result.files] == ["optimizer.bin"]
    merged = torch.load(tmp_path / "out/optimizer.bin", weights_only=True)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(merged["state"]) == sorted(names)
    assert [sorted(group["params"]) for group in merged["param_groups"]] == [["0.bias", "0.weight"], ["1.weight"]]
    fresh, other = trained()
    for values in other.state.values():
        values["exp_avg"].zero_()
    other.param_groups[0]["lr"] = 7.0
    set_optimizer_state_dict(fresh, other, merged, options=StateDictOptions(full_state_dict=True))
    for (name, one), two in zip(model.named_parameters(), fresh.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            assert torch.equal(other.state[two][key], value), (name, key)
    for one, two in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert [one["lr"], one["weight_decay"], *one["betas"]] == [two["lr"], two["weight_decay"], *two["betas"]]


def test_optimizer_beside_a_model_in_one_checkpoint_is_merged_alone(tmp_path):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer), "step": 3}
    dcp.save({"app": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    result = merge(tmp_path / "ckpt", tmp_path / "out", options=OPTIMIZER)
    merged = torch.load(tmp_path / "out/optimizer.bin", weights_only=True)
    assert torch.equal(merged["state"]["0.weight"]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert sorted(result.skipped) == ["app.model.0.bias", "app.model.0.weight", "app.model.1.weight", "app.step"]


def test_merged_optimizer_loses_the_names_of_wrappers(tmp_path):
    state = {
        "state": {f"module._orig_mod.{name}": {"exp_avg": torch.ones(2)} for name in ("a", "b")},
        "param_groups": [{"lr": 0.1, "params": ["module._orig_mod.a", "module._orig_mod.b"]}],
    }
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    merge(tmp_path / "ckpt", tmp_path / "out", options=OPTIMIZER)
    merged = torch.load(tmp_path / "out/optimizer.bin", weights_only=True)
    assert (sorted(merged["state"]), merged["param_groups"][0]["params"]) == (["a", "b"], ["a", "b"])


def test_merged_optimizer_joins_the_merged_model_and_replaces_only_itself(tmp_path):
    model, _ = save(tmp_path / "run/optimizer_0", flat=False)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run/pytorch_model_fsdp_0", no_dist=True)
    merge(tmp_path / "run", tmp_path / "out")
    weights = (tmp_path / "out/model.safetensors").read_bytes()
    (tmp_path / "out/optimizer.bin").write_text("old")
    merge(tmp_path / "run", tmp_path / "out", options=MergeOptions(optimizer=True, overwrite=True))
    assert (tmp_path / "out/model.safetensors").read_bytes() == weights
    assert len(torch.load(tmp_path / "out/optimizer.bin", weights_only=True)["state"]) == 3


class Canary:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_optimizer_whose_values_would_run_code_is_refused(tmp_path):
    state = {"state": {"w": {"exp_avg": torch.ones(2), "step": Canary(tmp_path / "canary")}}, "param_groups": []}
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    with pytest.raises(CheckpointError, match="cannot be loaded without running code"):
        merge(tmp_path / "ckpt", tmp_path / "out", options=OPTIMIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_model_or_folder_without_an_optimizer_is_refused(tmp_path):
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "run/pytorch_model_fsdp_0", no_dist=True)
    with pytest.raises(CheckpointError, match="holds no optimizer's checkpoint: no folder optimizer_0"):
        merge(tmp_path / "run", tmp_path / "out", options=OPTIMIZER)
    with pytest.raises(CheckpointError, match="holds no single optimizer's state: it holds w"):
        merge(tmp_path / "run/pytorch_model_fsdp_0", tmp_path / "out", options=OPTIMIZER)
    for number in range(2):
        save(tmp_path / f"two/optimizer_{number}", flat=False)
    with pytest.raises(AmbiguousError, match=r"holds 2 optimizers: .*optimizer_0, .*optimizer_1"):
        merge(tmp_path / "two", tmp_path / "out", options=OPTIMIZER)


@pytest.mark.parametrize("more", [{"dtype": "bf16"}, {"only": ("w",)}, {"remove_checkpoint_dir": True}])
def test_options_of_weights_are_refused_for_an_optimizer(more):
    with pytest.raises(UsageError, match=r"only (in a merge to safetensors|after a merge of the weights)"):
        MergeOptions(optimizer=True, **more)
