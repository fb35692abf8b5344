"""fsdplaunch: launch, shard, checkpoint and merge Fully Sharded Data Parallel training.

The names below load on first use, so that `import fsdplaunch` costs nothing: not even `typing` is imported.
"""

TYPE_CHECKING = False  # as type checkers know it

__version__ = "0.1.0"

# Where each public name lives; module __getattr__ (PEP 562) imports it on first use.
_HOMES = {
    "FullyShardedDataParallelPlugin": "fsdplaunch.runtime.plugin",
    "prepare": "fsdplaunch.runtime.api.prepare",
    "describe": "fsdplaunch.runtime.inspection.describe",
    "clip_grad_norm_": "fsdplaunch.runtime.api.gradients",
    "clip_grad_value_": "fsdplaunch.runtime.api.gradients",
    "no_sync": "fsdplaunch.runtime.api.gradients",
    "context_parallel": "fsdplaunch.runtime.split.split_blocks",
    "apply": "fsdplaunch.runtime.api.summon_full_params",
    "summon_full_params": "fsdplaunch.runtime.api.summon_full_params",
    "fsdp_modules": "fsdplaunch.runtime.inspection.units",
    "named_buffers": "fsdplaunch.runtime.inspection",
    "named_parameters": "fsdplaunch.runtime.inspection",
    "params_with_grad": "fsdplaunch.runtime.inspection.units",
    "state_dict_type": "fsdplaunch.runtime.state_dict.state_dict_type",
    "load_weights": "fsdplaunch.runtime.loading.load",
    "save_checkpoint": "fsdplaunch.runtime.saving.save_load",
    "load_checkpoint": "fsdplaunch.runtime.saving.save_load",
    "should_stop": "fsdplaunch.runtime.should_stop",
    "merge_fsdp_weights": "fsdplaunch.checkpoint.merge.merge",
    "DistModule": "fsdplaunch.runtime.api.accelerate_names",
    "apply_fsdp2": "fsdplaunch.runtime.api.accelerate_names",
    "disable_fsdp_ram_efficient_loading": "fsdplaunch.runtime.api.accelerate_names",
    "enable_fsdp_ram_efficient_loading": "fsdplaunch.runtime.api.accelerate_names",
    "fsdp2_load_full_state_dict": "fsdplaunch.runtime.api.accelerate_names",
    "fsdp2_prepare_auto_wrap_policy": "fsdplaunch.runtime.api.accelerate_names",
    "fsdp2_prepare_model": "fsdplaunch.runtime.api.accelerate_names",
    "fsdp2_switch_optimizer_parameters": "fsdplaunch.runtime.api.accelerate_names",
    "load_state_dict": "fsdplaunch.runtime.api.accelerate_names",
    "full_optim_state_dict": "fsdplaunch.runtime.state_dict.named_states",
    "rekey_optim_state_dict": "fsdplaunch.runtime.state_dict.named_states",
    "scatter_full_optim_state_dict": "fsdplaunch.runtime.state_dict.named_states",
    "shard_full_optim_state_dict": "fsdplaunch.runtime.state_dict.named_states",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  (names of the lazy table)

if TYPE_CHECKING:
    from typing import Any

    from fsdplaunch.checkpoint.merge.merge import merge_fsdp_weights
    from fsdplaunch.runtime.api.accelerate_names import (
        DistModule,
        apply_fsdp2,
        disable_fsdp_ram_efficient_loading,
        enable_fsdp_ram_efficient_loading,
        fsdp2_load_full_state_dict,
        fsdp2_prepare_auto_wrap_policy,
        fsdp2_prepare_model,
        fsdp2_switch_optimizer_parameters,
        load_state_dict,
    )
    from fsdplaunch.runtime.api.gradients import clip_grad_norm_, clip_grad_value_, no_sync
    from fsdplaunch.runtime.api.prepare import prepare
    from fsdplaunch.runtime.api.summon_full_params import apply, summon_full_params
    from fsdplaunch.runtime.inspection import named_buffers, named_parameters
    from fsdplaunch.runtime.inspection.describe import describe
    from fsdplaunch.runtime.inspection.units import fsdp_modules, params_with_grad
    from fsdplaunch.runtime.loading.load import load_weights
    from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin
    from fsdplaunch.runtime.saving.save_load import load_checkpoint, save_checkpoint
    from fsdplaunch.runtime.should_stop import should_stop
    from fsdplaunch.runtime.split.split_blocks import context_parallel
    from fsdplaunch.runtime.state_dict.named_states import (
        full_optim_state_dict,
        rekey_optim_state_dict,
        scatter_full_optim_state_dict,
        shard_full_optim_state_dict,
    )
    from fsdplaunch.runtime.state_dict.state_dict_type import state_dict_type


def __getattr__(name: str) -> "Any":
    home = _HOMES.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from fsdplaunch.features import feature

    if home.startswith("fsdplaunch.runtime."):
        from fsdplaunch.probe.torch_version import refuse_too_old

        refuse_too_old()
    value = getattr(feature(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES} - {"TYPE_CHECKING"})
