"""Whole parameters for a while, state dicts of each kind, names, methods beside forward: for both versions."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import fsdplaunch
from fsdplaunch.errors import UsageError
from tests.distributed.pool import RankPool
from tests.distributed.tiny import TinyLM, adamw, batch, build, loss_of, my_part, plugin, train_sharded

KINDS: dict[str, dict[str, Any]] = {
    "FSDP1": {"fsdp_version": 1},
    "FSDP1 flat": {"fsdp_version": 1, "use_orig_params": False},
    "FSDP2": {"fsdp_version": 2},
    "FSDP2 recomputing": {"fsdp_version": 2, "activation_checkpointing": True},
}


def prepared(fields: dict[str, Any], **options: Any) -> Any:
    return fsdplaunch.prepare(build(**options), plugin=plugin(**fields))


def summoned(fields: dict[str, Any]) -> dict[str, Any]:
    """What is seen inside, what stays of a change, and whether training goes on."""
    model = prepared({**fields, "mixed_precision_policy": "bf16"})
    full = dict(build().named_parameters())
    with fsdplaunch.summon_full_params(model, writeback=False), torch.no_grad():
        named = dict(fsdplaunch.named_parameters(model))
        same = set(named) == set(full) and all(torch.equal(named[name], full[name]) for name in full)
        for param in named.values():
            param.add_(5.0)
    with fsdplaunch.summon_full_params(model), torch.no_grad():
        kept = [torch.equal(param, full[name]) for name, param in fsdplaunch.named_parameters(model)]
        for _, param in fsdplaunch.named_parameters(model):
            param.mul_(2.0)
    with fsdplaunch.state_dict_type(model, "full_state_dict", FullStateDictConfig(rank0_only=False)):
        state = model.state_dict()
    doubled = all(torch.equal(state[name], 2 * param) for name, param in full.items())
    losses = train_sharded(model, adamw(model.parameters()), 3)
    return {"same": same, "kept": all(kept), "doubled": doubled, "trains": losses[-1] == losses[-1]}


@pytest.mark.parametrize("kind", KINDS)
def test_full_parameters_are_exact_and_changes_stay_if_set_so(two_ranks: RankPool, kind: str) -> None:
    for found in two_ranks.run(summoned, KINDS[kind]):
        assert found == {"same": True, "kept": True, "doubled": True, "trains": True}


def summoned_gradients(version: int) -> float:
    alone = build()
    loss_of(alone, batch(0)).backward()
    model = prepared({"fsdp_version": version})
    loss_of(model, my_part(batch(0))).backward()
    with fsdplaunch.summon_full_params(model, with_grads=True, writeback=False):
        named = dict(fsdplaunch.named_parameters(model))
        differences = [(named[n].grad - p.grad).abs().max().item() for n, p in alone.named_parameters()]
    held = len(fsdplaunch.params_with_grad(model))  # FSDP1: where a rank has nothing of one, it has no gradient
    assert held == len(list(model.parameters())) if version == 2 else held > 0
    return max(differences)


@pytest.mark.parametrize("version", [1, 2])
def test_full_gradients_are_those_of_the_unsharded_model(two_ranks: RankPool, version: int) -> None:
    assert max(two_ranks.run(summoned_gradients, version)) < 1e-6


def only_on_rank_0(version: int) -> bool:
    model = prepared({"fsdp_version": version})
    with fsdplaunch.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        shapes = {name: tuple(param.shape) for name, param in fsdplaunch.named_parameters(model)}
        local = {
            tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape)
            for _, p in fsdplaunch.named_parameters(model)
        }
    whole = {name: tuple(param.shape) for name, param in build().named_parameters()}
    return shapes == whole and set(whole.values()) == local


@pytest.mark.parametrize("version", [1, 2])
def test_full_parameters_are_on_rank_0_only_if_set_so(two_ranks: RankPool, version: int) -> None:
    assert two_ranks.run(only_on_rank_0, version) == [True, False]


def test_changes_of_one_rank_cannot_be_written_back() -> None:
    with (
        pytest.raises(UsageError, match="cannot write back"),
        fsdplaunch.summon_full_params(build(), rank0_only=True),
    ):
        pass


def given_new_values(fields: dict[str, Any]) -> tuple[bool, list[float]]:
    torch.manual_seed(dist.get_rank())
    model = prepared(fields)

    def randomise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.normal_()

    assert fsdplaunch.apply(model, randomise) is model
    with fsdplaunch.summon_full_params(model, writeback=False):
        named = dict(fsdplaunch.named_parameters(model))
        changed = not torch.equal(named["head.weight"], build().head.weight)
        return changed, [float(param.sum()) for param in named.values()]


@pytest.mark.parametrize("kind", ["FSDP1", "FSDP2"])
def test_function_applied_to_modules_leaves_all_ranks_equal(two_ranks: RankPool, kind: str) -> None:
    first, second = two_ranks.run(given_new_values, KINDS[kind])
    assert first == second
    assert first[0]


def test_state_of_a_plain_model_has_one_kind_only() -> None:
    with pytest.raises(UsageError, match="nothing of this TinyLM is sharded"), fsdplaunch.state_dict_type(build()):
        pass


def members(version: int) -> tuple[int, int, int, bool]:
    model = prepared({"fsdp_version": version, "activation_checkpointing": True})
    outer = nn.Sequential(model)
    names = {name for name, _ in fsdplaunch.named_parameters(model)}
    buffers = {name for name, _ in fsdplaunch.named_buffers(model)}
    return (
        len(fsdplaunch.fsdp_modules(model)),
        len(fsdplaunch.fsdp_modules(outer, root_only=True)),
        len(fsdplaunch.params_with_grad(model)),
        names == {name for name, _ in build().named_parameters()} and buffers == {"scale"},
    )


@pytest.mark.parametrize("version", [1, 2])
def test_members_of_a_model_go_by_the_users_names(two_ranks: RankPool, version: int) -> None:
    assert two_ranks.run(members, version)[0] == (4, 1, 0, True)


# Methods beside forward


class WithMethods(TinyLM):
    def score(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers[0](self.embed(ids))))

    def generate(self, ids: torch.Tensor, more: int) -> torch.Tensor:
        for _ in range(more):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], dim=1)
        return ids


def with_methods() -> WithMethods:
    torch.manual_seed(0)
    return WithMethods()


def methods(version: int, training: bool) -> tuple[bool, float, bool]:
    """Whether generate gives the same, how far gradients through another method are off, and forward after it."""
    alone = with_methods().train(training)
    fields = {"fsdp_version": version, "forward_methods": ["score"]}
    model = fsdplaunch.prepare(with_methods(), plugin=plugin(**fields)).train(training)
    ids = batch(0)[:, :3]
    with torch.no_grad():
        same = torch.equal(model.generate(ids, 3), alone.generate(ids, 3))
    alone.score(ids).square().mean().backward()
    model.score(ids).square().mean().backward()
    with fsdplaunch.summon_full_params(model, with_grads=True, writeback=False):
        named = dict(fsdplaunch.named_parameters(model))
        pairs = [(named[n].grad, p.grad) for n, p in alone.named_parameters() if p.grad is not None]
        off = max((mine - full).abs().max().item() for mine, full in pairs if mine is not None)
    assert any(mine is not None for mine, _ in pairs)
    return same, off, torch.allclose(model(ids), alone(ids), atol=1e-6)


@pytest.mark.parametrize(("version", "training"), [(1, False), (2, True)])
def test_methods_beside_forward_compute_with_full_parameters(
    two_ranks: RankPool, version: int, training: bool
) -> None:
    same, off, forward = two_ranks.run(methods, version, training)[0]
    assert same
    assert off < 1e-6
    assert forward


# Compiling


COMPILING = {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}


def compiled() -> tuple[str | None, float, bool]:
    from tests.distributed.tiny import train_alone

    alone = train_alone(build(), 3)
    model = build()
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()))
    sharded = train_sharded(model, optimizer, 3)
    names = {name for name, _ in model.named_parameters()} == {name for name, _ in build().named_parameters()}
    clean = names or isinstance(model, FullyShardedDataParallel)
    return fsdplaunch.describe(model).compiled, max(abs(a - b) for a, b in zip(alone, sharded, strict=True)), clean


@pytest.mark.parametrize(("version", "regional"), [("1", "false"), ("2", "true")])
def test_compiled_model_trains_as_alone_under_its_own_names(
    two_ranks: RankPool, version: str, regional: str
) -> None:
    env = {**COMPILING, "FSDP_VERSION": version, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": regional}
    what, difference, clean = two_ranks.run(compiled, env=env, timeout=150)[0]
    assert what == ("blocks" if regional == "true" else "model")
    assert difference < 1e-5
    assert clean


def test_copy_of_a_compiled_module_computes_with_its_own_parameters() -> None:
    from copy import deepcopy
    from inspect import signature

    from fsdplaunch.config.schema.sharding_sections import DynamoConfig
    from fsdplaunch.runtime.sharding.compute import CompiledForward

    module = nn.Linear(3, 2)
    module.__dict__["forward"] = CompiledForward(module, DynamoConfig(dynamo_backend="EAGER"))
    copied = deepcopy(module)
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.fill_(7.0)
    assert copied(torch.ones(1, 3)).tolist() == [[7.0, 7.0]]
    assert list(signature(copied.forward).parameters) == ["input"]
    assert module(torch.ones(1, 3)).tolist() != [[7.0, 7.0]]
