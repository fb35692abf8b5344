"""The functions of the reference documents, under their names, for both versions where they apply."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, fully_shard

import fsdplaunch
from fsdplaunch.errors import CheckpointError, UsageError
from tests.distributed.pool import RankPool
from tests.distributed.tiny import adamw, build, plugin, train_alone, train_sharded

KINDS: dict[str, dict[str, Any]] = {
    "1": {"fsdp_version": 1},
    "1 flat": {"fsdp_version": 1, "use_orig_params": False},
    "2": {"fsdp_version": 2},
}


def trained(fields: dict[str, Any]) -> tuple[nn.Module, Any]:
    model = build()
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    train_sharded(model, optimizer, 3)
    return model, optimizer


def alone() -> tuple[nn.Module, Any]:
    model = build()
    made: list[Any] = []

    def make(params: Any) -> Any:
        made.append(adamw(params))
        return made[0]

    train_alone(model, 3, make=make)
    return model, made[0]


def states_of_optimizers(fields: dict[str, Any]) -> dict[str, Any]:
    """What a gathered state is, and how training goes on from it in other models."""
    model, optimizer = trained(fields)
    on_first = fsdplaunch.full_optim_state_dict(model, optimizer)
    everywhere = fsdplaunch.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain, plain_optimizer = alone()
    named = fsdplaunch.rekey_optim_state_dict(plain_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    assert set(named["state"]) == set(everywhere["state"])
    apart = max(
        (everywhere["state"][name][key] - value).abs().max().item()
        for name, values in named["state"].items()
        for key, value in values.items()
    )
    losses = [train_sharded(model, optimizer, 4, first=3)]
    for how in ("shard", "scatter"):
        fresh = build(seed=7)
        fresh.load_state_dict(alone()[0].state_dict())
        fresh, new = fsdplaunch.prepare(fresh, adamw(fresh.parameters()), plugin=plugin(**fields))
        if how == "shard":
            state = fsdplaunch.shard_full_optim_state_dict(everywhere, fresh, optim=new)
        else:
            state = fsdplaunch.scatter_full_optim_state_dict(on_first or None, fresh, optim=new)
        new.load_state_dict(state)
        losses.append(train_sharded(fresh, new, 4, first=3))
    moved = adamw(plain.parameters())
    moved.load_state_dict(fsdplaunch.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, plain))
    losses.append(train_alone(plain, 4, make=lambda _: moved, first=3))
    return {"apart": apart, "sizes": [len(on_first), len(everywhere)], "losses": losses}


@pytest.mark.parametrize("kind", KINDS)
def test_full_state_is_that_of_the_unsharded_run_and_goes_on_elsewhere(two_ranks: RankPool, kind: str) -> None:
    results = two_ranks.run(states_of_optimizers, KINDS[kind])
    assert [result["sizes"] for result in results] == [[2, 2], [0, 2]]
    for result in results:
        assert result["apart"] < 1e-5
        kept_on, *others = result["losses"]
        assert others == [pytest.approx(kept_on, abs=1e-5)] * 3  # two sharded models, and a plain one


def test_state_of_a_stranger_is_not_rekeyed() -> None:
    state = {"state": {"layers.9.weight": {}}, "param_groups": [{"params": ["layers.9.weight"]}]}
    with pytest.raises(UsageError, match=r"has 'layers\.9\.weight', which TinyLM does not have"):
        fsdplaunch.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, build())


def test_dist_module_is_the_wrapped_module_to_its_user() -> None:
    model = build()
    wrapped = fsdplaunch.DistModule(model)
    wrapped.eval()
    wrapped.note = "set through the wrapper"
    assert (model.training, model.layers[0].training, wrapped.training) == (False, False, False)
    assert model.note == wrapped.note
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert set(wrapped.state_dict()) == set(model.state_dict())
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert torch.equal(wrapped(ids), model(ids))


def test_dist_module_of_nothing_is_told_so() -> None:
    with pytest.raises(UsageError, match="DistModule wraps a module, got NoneType") as caught:
        fsdplaunch.DistModule(None)
    assert caught.value.hint == "apply_fsdp2 shards in place and returns nothing"


def switched() -> tuple[list[float], list[float]]:
    expected = train_alone(build(), 5)
    model = build()
    optimizer = adamw(model.parameters())
    addresses = {name: param.data_ptr() for name, param in model.named_parameters()}
    keep = list(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    mapping = {addresses[name]: param for name, param in model.named_parameters()}
    old = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [
        Pointer(param, addresses[name]) for param, name in zip(old, addresses, strict=True)
    ]
    del keep
    fsdplaunch.fsdp2_switch_optimizer_parameters(optimizer, mapping)
    return expected, train_sharded(model, optimizer, 5)


class Pointer:
    """Stands for a parameter whose storage is gone, with the address it had, as accelerate's placeholders do."""

    def __init__(self, param: torch.Tensor, address: int) -> None:
        self.shape = param.shape
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def test_switched_optimizer_trains_the_shards(two_ranks: RankPool) -> None:
    expected, losses = two_ranks.run(switched)[0]
    assert losses == pytest.approx(expected, abs=1e-5)


def test_model_is_not_prepared_under_that_name_with_fsdp1() -> None:
    with pytest.raises(UsageError, match="needs fsdp_version 2, the plugin has 1"):
        fsdplaunch.fsdp2_prepare_model(build(), plugin(fsdp_version=1))


def test_loading_switches_are_what_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from os import environ

    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    fsdplaunch.enable_fsdp_ram_efficient_loading()
    assert (environ["ACCELERATE_USE_FSDP"], environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("true", "true")
    fsdplaunch.disable_fsdp_ram_efficient_loading()
    assert environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_file_of_weights_is_read_to_the_places_given(tmp_path: Path, suffix: str) -> None:
    from safetensors.torch import save_file

    state = {"a.weight": torch.ones(2), "b.c.weight": torch.zeros(3)}
    path = tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    read = fsdplaunch.load_state_dict(str(path))
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    moved = fsdplaunch.load_state_dict(str(path), device_map={"": "cpu", "b": "meta"})
    assert [moved[name].device.type for name in state] == ["cpu", "meta"]
    assert fsdplaunch.load_state_dict(str(path), device_map="meta")["a.weight"].is_meta


def read_everywhere(path: str) -> int:
    return len(fsdplaunch.load_state_dict(path))


def test_file_of_weights_is_read_on_rank_0_only(two_ranks: RankPool, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.bin")
    assert two_ranks.run(read_everywhere, str(tmp_path / "weights.bin")) == [1, 0]


def test_damaged_file_of_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=r"cannot read .*weights\.safetensors"):
        fsdplaunch.load_state_dict(str(tmp_path / "weights.safetensors"))


class Mixed(nn.Module):
    """Tied parameters, a persistent buffer and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)


def mixed_from_rank_0(kind: str) -> tuple[bool, list[float], bool]:
    """Whether everything is rank 0's, the persistent buffer, and whether the tie holds."""
    torch.manual_seed(dist.get_rank())
    with torch.device("meta" if "meta" in kind else "cpu"):
        model = Mixed()
    model.scale = torch.tensor(2.0)
    if kind == "FSDP1":
        model = fsdplaunch.prepare(model, plugin=plugin(fsdp_version=1, auto_wrap_policy="NO_WRAP"))
    elif kind == "meta, DistModule":
        fsdplaunch.apply_fsdp2(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        fully_shard(model)
    torch.manual_seed(7)
    full = Mixed()
    full.norm.running_mean.copy_(torch.arange(4.0))
    state = full.state_dict() if dist.get_rank() == 0 else {}
    if kind == "meta, DistModule":
        assert fsdplaunch.DistModule(model).load_state_dict(state) == ([], [])
    else:
        fsdplaunch.fsdp2_load_full_state_dict(model, state)
    if kind == "FSDP1":
        with FullyShardedDataParallel.summon_full_params(model):
            equal = torch.equal(model.module.embed.weight, full.embed.weight)
        return equal, model.module.norm.running_mean.tolist(), True
    equal = torch.equal(model.embed.weight.full_tensor(), full.embed.weight)
    return equal, model.norm.running_mean.tolist(), model.head.weight is model.embed.weight


@pytest.mark.parametrize("kind", ["FSDP2", "meta, DistModule", "FSDP1"])
def test_full_weights_with_buffers_and_ties_reach_every_shard(two_ranks: RankPool, kind: str) -> None:
    assert (
        two_ranks.run(mixed_from_rank_0, kind, env={"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"})
        == [(True, [0.0, 1.0, 2.0, 3.0], True)] * 2
    )
