"""Accelerate's functions as scripts call them: with the accelerator and without, on its objects and on ours."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import always_wrap_policy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

import fsdplaunch
from fsdplaunch.errors import CheckpointError, LaunchError, ShardingError, UsageError
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.sharding.wrap import plan_units, torch_form
from tests.distributed.pool import RankPool
from tests.distributed.tiny import Block, adamw, build, my_part, plugin, train_sharded

pytest.importorskip("accelerate", reason="accelerate is a development dependency")


def accelerator(**fields: Any) -> Any:
    """Of accelerate's accelerator what these functions look at, with accelerate's own plugin."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    PartialState(cpu=True)  # its logger asks for it
    theirs = FullyShardedDataParallelPlugin(**fields)
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=theirs),
        num_processes=dist.get_world_size() if theirs.fsdp_version == 2 else 1,  # offload ends FSDP1 on a CPU
        process_index=dist.get_rank(),
        is_main_process=dist.get_rank() == 0,
        is_fsdp2=theirs.fsdp_version == 2,
        wait_for_everyone=dist.barrier,
    )


# --- every name and every argument that is documented


FUNCTIONS = [
    "merge_fsdp_weights",
    "fsdp2_load_full_state_dict",
    "fsdp2_switch_optimizer_parameters",
    "fsdp2_prepare_model",
    "fsdp2_prepare_auto_wrap_policy",
    "enable_fsdp_ram_efficient_loading",
    "disable_fsdp_ram_efficient_loading",
]
LEADING = ("fsdp_plugin", "accelerator")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_have_accelerates_names_order_and_defaults(name: str) -> None:
    from accelerate.utils import fsdp_utils

    if not hasattr(fsdp_utils, name):
        pytest.skip(f"this accelerate has no {name}")
    theirs = inspect.signature(getattr(fsdp_utils, name)).parameters
    ours = inspect.signature(getattr(fsdplaunch, name)).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    shared = [each for each in theirs if each not in LEADING and theirs[each].kind not in kinds]
    positional = [each for each in ours.values() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [each.name for each in positional][: len(shared)] == shared
    for each in shared:
        if theirs[each].default is not inspect.Parameter.empty:
            assert ours[each].default == theirs[each].default
    assert all(each in ours for each in theirs if each in LEADING)


PLUGIN_FIELDS = """
fsdp_version sharding_strategy reshard_after_forward backward_prefetch mixed_precision_policy auto_wrap_policy
cpu_offload ignored_modules state_dict_type state_dict_config optim_state_dict_config limit_all_gathers
use_orig_params param_init_fn sync_module_states forward_prefetch activation_checkpointing
cpu_ram_efficient_loading transformer_cls_names_to_wrap min_num_params
"""


def test_plugin_takes_its_documented_fields_in_their_order() -> None:
    params = list(inspect.signature(fsdplaunch.FullyShardedDataParallelPlugin).parameters.values())
    documented = PLUGIN_FIELDS.split()
    assert [each.name for each in params][: len(documented)] == documented
    assert all(each.default is None for each in params)  # the configuration's value
    assert fsdplaunch.FullyShardedDataParallelPlugin().limit_all_gathers is True
    assert fsdplaunch.FullyShardedDataParallelPlugin(1, "FULL_SHARD").fsdp_version == 1


OTHER_DEFAULTS = {
    "auto_wrap_policy": "blocks that the model repeats are found and wrapped; theirs makes one unit",
    "min_num_params": "the size that size_based_wrap would use is shown whatever the policy",
    "sync_module_states": "rank 0's values are sent, so that ranks cannot start apart",
    "cpu_ram_efficient_loading": "what rank 0 has is sent, so others need not load it",
    "use_orig_params": "true, which torch recommends and FSDP2 always does",
    "param_init_fn": "goes with sync_module_states, as theirs does once that is true",
    "backward_prefetch": "BACKWARD_PRE, torch's own default; theirs gathers nothing ahead",
    "forward_prefetch": "false where theirs is None, which means false",
}
"""Fields whose values, where nobody sets them, are not accelerate's, and why."""
DOCUMENTED = {"fsdp_version": 1, "limit_all_gathers": True, "forward_prefetch": False}
"""Of the reference's page: what holds where nothing is set, and is the same here."""


@pytest.mark.parametrize("version", [1, 2])
def test_plugin_has_the_documented_defaults_but_for_those_with_a_reason(version: int) -> None:
    from dataclasses import fields

    from accelerate.utils import FullyShardedDataParallelPlugin

    theirs = FullyShardedDataParallelPlugin(fsdp_version=version)
    ours = fsdplaunch.FullyShardedDataParallelPlugin(fsdp_version=version)
    names = {each.name for each in fields(theirs)}
    differing = {name for name in names if repr(getattr(ours, name)) != repr(getattr(theirs, name))}
    assert differing <= set(OTHER_DEFAULTS)
    if version == 1:
        assert differing == set(OTHER_DEFAULTS) - {"forward_prefetch"}
    silent = fsdplaunch.FullyShardedDataParallelPlugin()
    assert {name: getattr(silent, name) for name in DOCUMENTED} == DOCUMENTED


def test_torchs_documented_functions_take_their_arguments() -> None:
    documented = {
        "full_optim_state_dict": "model optim optim_input rank0_only",
        "shard_full_optim_state_dict": "full_optim_state_dict model optim_input",
        "scatter_full_optim_state_dict": "full_optim_state_dict model optim_input group",
        "rekey_optim_state_dict": "optim_state_dict optim_state_key_type model optim_input",
        "summon_full_params": "module recurse writeback",
        "fsdp_modules": "module root_only",
        "state_dict_type": "model state_dict_type",
        "clip_grad_norm_": "parameters max_norm norm_type",
        "apply_fsdp2": "model mesh",
        "load_state_dict": "checkpoint_file device_map",
    }
    for name, arguments in documented.items():
        params = list(inspect.signature(getattr(fsdplaunch, name)).parameters)
        assert params[: len(arguments.split())] == arguments.split(), name


# --- both call forms


def loaded_in_forms() -> list[bool]:
    """Whether each way to call returns the model, with rank 0's weights in it."""
    source, load = build(3).state_dict(), fsdplaunch.fsdp2_load_full_state_dict
    full_sd = source if dist.get_rank() == 0 else {}
    calls: list[Callable[[nn.Module], Any]] = [
        lambda model: load(accelerator(), model, full_sd),
        lambda model: load(accelerator=accelerator(), model=model, full_sd=full_sd, cpu_offload=False),
        lambda model: load(model, full_sd, True),
    ]
    found = []
    for call in calls:
        model = fully_shard(build(8), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        same = call(model) is model
        found.append(same and all(torch.equal(p.full_tensor(), source[n]) for n, p in model.named_parameters()))
    return found


def test_full_weights_load_in_every_call_form(two_ranks: RankPool) -> None:
    assert two_ranks.run(loaded_in_forms) == [[True] * 3] * 2


def prepared_in_forms() -> list[tuple[bool, int]]:
    theirs = accelerator(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    whole = accelerator(fsdp_version=2)
    models = [
        fsdplaunch.fsdp2_prepare_model(theirs, build()),
        fsdplaunch.fsdp2_prepare_model(accelerator=theirs, model=build()),
        fsdplaunch.fsdp2_prepare_model(whole, model=build()),
        fsdplaunch.fsdp2_prepare_model(build()),
        fsdplaunch.fsdp2_prepare_model(build(), plugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")),
    ]
    again = fsdplaunch.fsdp2_prepare_model(whole, models[0])
    assert again is models[0]
    return [
        (isinstance(m.head.weight, DTensor), sum(isinstance(x, FSDPModule) for x in m.modules())) for m in models
    ]


def test_model_is_prepared_in_every_call_form(two_ranks: RankPool) -> None:
    expected = [(True, 4), (True, 4), (True, 1), (True, 4), (True, 1)]
    assert two_ranks.run(prepared_in_forms) == [expected] * 2


def test_wrap_policy_is_made_of_accelerates_plugin_too() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    model = build()
    theirs = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    policy = fsdplaunch.fsdp2_prepare_auto_wrap_policy(theirs, model)
    assert policy is not None
    assert [m for m in model.modules() if policy(m)] == [m for m in model.modules() if isinstance(m, Block)]
    assert fsdplaunch.fsdp2_prepare_auto_wrap_policy(FullyShardedDataParallelPlugin(fsdp_version=2), model) is None


# --- wrap policies


def by_name_only(module: nn.Module, *, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Block)


class OfThree:
    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, Block)


BLOCKS = ["layers.0", "layers.1", "layers.2"]
POLICIES: dict[str, Any] = {
    "torch": partial(size_based_auto_wrap_policy, min_num_params=2000),
    "by name": by_name_only,
    "predicate": lambda m: isinstance(m, Block),
    "predicate with a default": lambda m, kind=Block: isinstance(m, kind),
    "predicate partial": partial(lambda kind, m: isinstance(m, kind), Block),
    "object": OfThree(),
}


@pytest.mark.parametrize("name", POLICIES)
def test_wrap_policies_of_every_signature(name: str) -> None:
    policy, model = POLICIES[name], build()
    for each in (policy, torch_form(policy)):
        assert list(plan_units(model, Settings(wrap=each), set())) == BLOCKS
    for module in model.modules():  # as torch itself calls it
        torch_form(policy)(module=module, recurse=False, nonwrapped_numel=0)


def test_policy_that_wraps_everything_wraps_everything() -> None:
    model = build()
    assert len(plan_units(model, Settings(wrap=always_wrap_policy), set())) > len(BLOCKS) * 5


def test_smallest_size_of_0_makes_no_unit() -> None:
    from fsdplaunch import FullyShardedDataParallelPlugin

    chosen = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=0)
    assert list(plan_units(build(), chosen.settings(), set())) == []
    chosen.set_auto_wrap_policy(build())
    assert chosen.auto_wrap_policy is None


# --- errors


def test_errors_are_those_that_torch_and_accelerate_raise_too() -> None:
    for ours, builtin in ((UsageError, ValueError), (ShardingError, ValueError), (CheckpointError, RuntimeError)):
        error = ours("what is wrong", hint="what to do")
        assert isinstance(error, builtin)
        assert isinstance(error, LaunchError)
        assert str(error) == "what is wrong\nhint: what to do"
    with pytest.raises(ValueError, match="/nowhere/at/all"):
        fsdplaunch.merge_fsdp_weights("/nowhere/at/all", "/nowhere/out")


# --- models on the meta device, quantised parameters


class Params4bit(nn.Parameter):
    """As quantised parameters are: frozen, packed into bytes or into what looks like numbers."""


class Quantised(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        packed = (torch.arange(16) % 7).to(dtype).view(16, 1)
        self.weight = torch.Tensor._make_subclass(Params4bit, packed, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.float().sum()


class Adapted(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = Quantised(dtype)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.packed(x))


def quantised_kept(version: int) -> list[tuple[str, str, list[float]]]:
    out = []
    for dtype in (torch.uint8, torch.bfloat16):
        model = nn.Sequential(Adapted(dtype), Adapted(dtype))
        chosen = plugin(fsdp_version=version, mixed_precision_policy="bf16")
        model = fsdplaunch.prepare(model, plugin=chosen)
        with fsdplaunch.summon_full_params(model):
            found = dict(fsdplaunch.named_parameters(model))["0.packed.weight"]
            out.append((str(found.dtype), type(found).__name__, found.detach().flatten().tolist()))
    return out


@pytest.mark.parametrize("version", [1, 2])
def test_quantised_parameters_are_left_as_they_are(two_ranks: RankPool, version: int) -> None:
    values = [float(n % 7) for n in range(16)]
    for result in two_ranks.run(quantised_kept, version):
        (whole, kind, packed), (stored, _, numbers) = result
        assert (whole, kind, packed) == ("torch.uint8", "Params4bit", values)
        assert (stored, numbers) == ("torch.bfloat16", values)


# --- states


def state_kinds(version: int) -> dict[str, bool]:
    """Whether each kind of state dict brings a model's weights into another model."""
    same = {}
    for kind in ("full", "sharded", "local"):
        fields = {"fsdp_version": version, "use_orig_params": kind != "local"}
        one = fsdplaunch.prepare(build(1), plugin=plugin(**fields))
        other = fsdplaunch.prepare(build(2), plugin=plugin(**fields))
        everywhere = torch.distributed.fsdp.FullStateDictConfig(rank0_only=False) if kind == "full" else None
        with fsdplaunch.state_dict_type(one, kind, everywhere):
            state = one.state_dict()
        with fsdplaunch.state_dict_type(other, kind, everywhere):
            keys = other.load_state_dict(state)
        with fsdplaunch.summon_full_params(one), fsdplaunch.summon_full_params(other):
            equal = all(map(torch.equal, one.parameters(), other.parameters()))
        flat = sorted(state) == ["_flat_param", *(f"layers.{n}._flat_param" for n in range(3))]
        same[kind] = equal and keys == ([], []) and flat == (kind == "local")
        if version == 2 and kind == "sharded":
            break
    one = fsdplaunch.prepare(build(1), plugin=plugin(fsdp_version=version))
    with pytest.raises(UsageError, match="LOCAL_STATE_DICT"), fsdplaunch.state_dict_type(one, "local"):
        pass
    with fsdplaunch.state_dict_type(one, "full"):
        with fsdplaunch.state_dict_type(one, "sharded"):
            assert all(isinstance(each, DTensor) for each in one.state_dict().values())
        assert not any(isinstance(each, DTensor) for each in one.state_dict().values())
    return same


@pytest.mark.parametrize("version", [1, 2])
def test_every_kind_of_state_dict_goes_out_and_in(two_ranks: RankPool, version: int) -> None:
    kinds = ["full", "sharded", "local"][: 4 - version]
    assert two_ranks.run(state_kinds, version) == [dict.fromkeys(kinds, True)] * 2


def partly_trained(seed: int) -> tuple[nn.Module, Any]:
    """FSDP1 with an optimizer that trains some of each unit's parameters, all of which require gradients."""
    model = build(seed)
    some = [param for name, param in model.named_parameters() if "qkv" in name or "gate" in name]
    model, optimizer = fsdplaunch.prepare(model, adamw(some), plugin=plugin(fsdp_version=1))
    return model, optimizer


def partial_goes_on(folder: str) -> tuple[list[str], list[list[float]]]:
    model, optimizer = partly_trained(0)
    train_sharded(model, optimizer, 2)
    full = fsdplaunch.full_optim_state_dict(model, optimizer)
    fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer)
    model.zero_grad()
    losses = [train_sharded(model, optimizer, 2, first=2)]
    model, optimizer = partly_trained(5)
    fsdplaunch.load_checkpoint(folder, model=model, optimizer=optimizer)
    losses.append(train_sharded(model, optimizer, 2, first=2))
    model, optimizer = partly_trained(5)
    fsdplaunch.load_checkpoint(folder, model=model)
    optimizer.load_state_dict(fsdplaunch.scatter_full_optim_state_dict(full, model, optim=optimizer))
    losses.append(train_sharded(model, optimizer, 2, first=2))
    assert all(param.requires_grad for param in model.parameters())
    return sorted(full.get("state", {})), losses


def test_optimizer_of_some_parameters_is_saved_and_loaded_under_fsdp1(two_ranks: RankPool, tmp_path: Path) -> None:
    (names, losses), (others, _) = two_ranks.run(partial_goes_on, str(tmp_path / "ckpt"))
    assert len(names) == 6
    assert others == []
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert losses[2] == pytest.approx(losses[0], abs=1e-6)


# --- accelerate's checkpoints


def made(seed: int, version: int, form: str) -> tuple[Any, Any, Any]:
    """A prepared model and optimizer, and an accelerator with a plugin for it."""
    fields = {"fsdp_version": version, "state_dict_type": form}
    model = build(seed)
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    theirs = accelerator(**fields)
    if version == 1:
        from torch.distributed.fsdp import FullOptimStateDictConfig

        options = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False)
        theirs.state.fsdp_plugin.optim_state_dict_config = options
    return model, optimizer, theirs


def written_and_read(folder: str, version: int, form: str) -> list[list[float]]:
    """How training goes on, from what accelerate's functions write and from what they read."""
    from accelerate.utils import fsdp_utils as theirs

    model, optimizer, acc = made(0, version, form)
    train_sharded(model, optimizer, 2)
    theirs.save_fsdp_model(acc.state.fsdp_plugin, acc, model, f"{folder}/theirs")
    theirs.save_fsdp_optimizer(acc.state.fsdp_plugin, acc, optimizer, model, f"{folder}/theirs")
    fsdplaunch.save_checkpoint(f"{folder}/ours", model=model, optimizer=optimizer)
    losses = [train_sharded(model, optimizer, 2, first=2)]
    model, optimizer, acc = made(7, version, form)
    fsdplaunch.load_checkpoint(f"{folder}/theirs", model=model, optimizer=optimizer)
    losses.append(train_sharded(model, optimizer, 2, first=2))
    model, optimizer, acc = made(7, version, form)
    train_sharded(model, optimizer, 1)
    theirs.load_fsdp_model(acc.state.fsdp_plugin, acc, model, f"{folder}/ours")
    if form == "FULL_STATE_DICT" or tuple(map(int, version_of("accelerate").split(".")[:2])) >= (1, 13):
        theirs.load_fsdp_optimizer(acc.state.fsdp_plugin, acc, optimizer, model, f"{folder}/ours")
        losses.append(train_sharded(model, optimizer, 2, first=2))  # 1.12 could not load its own either
    return losses


@pytest.mark.parametrize(("version", "form"), [(1, "FULL_STATE_DICT"), (2, "SHARDED_STATE_DICT")])
def test_each_reads_the_others_checkpoint(two_ranks: RankPool, tmp_path: Path, version: int, form: str) -> None:
    losses = two_ranks.run(written_and_read, str(tmp_path), version, form)[0]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-6)


# --- Accelerator(fsdp_plugin=ours)


def through_accelerate(version: int) -> tuple[bool, bool, int, list[float]]:
    """Train by accelerate's own means, with this package's plugin."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    changed = ((PartialState, "_prepare_backend"), (FullyShardedDataParallelPlugin, "__post_init__"))
    with ExitStack() as stack:  # the ranks run other tests after this one
        for owner, name in (*changed, (FullyShardedDataParallel, "__init__"), (Accelerator, "_prepare_cp")):
            stack.enter_context(mock.patch.object(owner, name, getattr(owner, name)))
        return _through_accelerate(version)


def _through_accelerate(version: int) -> tuple[bool, bool, int, list[float]]:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from fsdplaunch.runtime.compat.accelerate import adapt_accelerate_to_cpu
    from fsdplaunch.runtime.compat.fsdp1 import construct_on_cpu
    from fsdplaunch.runtime.patch import wrap

    adapt_accelerate_to_cpu()
    wrap(FullyShardedDataParallel, "__init__", construct_on_cpu)
    split = SimpleNamespace(parallelism_config=ParallelismConfig(cp_size=2))
    with pytest.raises(
        ShardingError, match=r"cp_size 2.* by torch's ring attention, which has no kernel for the CPU"
    ):
        Accelerator._prepare_cp(split)  # type: ignore[arg-type]
    AcceleratorState._reset_state(True)
    ours = plugin(fsdp_version=version, transformer_cls_names_to_wrap=["Block"])
    try:
        acc = Accelerator(fsdp_plugin=ours)
        model = build()
        model, optimizer = acc.prepare(model, adamw(model.parameters()))
        kinds = (FSDPModule, FullyShardedDataParallel)
        units = sum(isinstance(module, kinds) for module in model.modules())
        losses = []
        for step in range(2):
            from tests.distributed.tiny import batch, loss_of, mean_over_ranks

            loss = loss_of(model, my_part(batch(step)))
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
        return isinstance(ours, FullyShardedDataParallelPlugin), acc.state.fsdp_plugin is ours, units, losses
    finally:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_takes_this_packages_plugin(two_ranks: RankPool, version: int) -> None:
    env = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}
    is_theirs, taken, units, losses = two_ranks.run(through_accelerate, version, env=env)[0]
    assert (is_theirs, taken) == (True, True)
    assert units >= 4
    assert losses[1] < losses[0]


def test_plugin_is_accelerates_without_importing_it() -> None:
    import subprocess
    import sys

    script = (
        "import sys\n"
        "from fsdplaunch import FullyShardedDataParallelPlugin as Ours\n"
        "before = Ours(fsdp_version=2)\n"
        "assert 'accelerate' not in sys.modules\n"
        "from accelerate.utils import FullyShardedDataParallelPlugin as Theirs\n"
        "assert isinstance(before, Theirs) and isinstance(Ours(), Theirs) and issubclass(Ours, Theirs)\n"
        "assert before == Ours(fsdp_version=2) and before != Ours(fsdp_version=1)\n"
        "import copy, dataclasses\n"
        "assert copy.deepcopy(before) == before\n"
        "assert Theirs() is not None and not isinstance(Theirs(), Ours)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
