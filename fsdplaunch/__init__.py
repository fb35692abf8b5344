"""fsdplaunch: launch, shard, checkpoint and merge Fully Sharded Data Parallel training.

The names below load on first use, so that `import fsdplaunch` costs nothing.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives; module __getattr__ (PEP 562) imports it on first use.
_HOMES = {
    "FullyShardedDataParallelPlugin": "fsdplaunch.runtime.plugin",
    "prepare": "fsdplaunch.runtime.prepare",
    "describe": "fsdplaunch.runtime.description",
    "clip_grad_norm_": "fsdplaunch.runtime.gradients",
    "clip_grad_value_": "fsdplaunch.runtime.gradients",
    "no_sync": "fsdplaunch.runtime.gradients",
    "apply": "fsdplaunch.runtime.full_parameters",
    "summon_full_params": "fsdplaunch.runtime.full_parameters",
    "fsdp_modules": "fsdplaunch.runtime.members",
    "named_buffers": "fsdplaunch.runtime.members",
    "named_parameters": "fsdplaunch.runtime.members",
    "params_with_grad": "fsdplaunch.runtime.members",
    "state_dict_type": "fsdplaunch.runtime.state_kind",
    "load_weights": "fsdplaunch.runtime.loading.load",
    "save_checkpoint": "fsdplaunch.runtime.state",
    "load_checkpoint": "fsdplaunch.runtime.state",
    "should_stop": "fsdplaunch.runtime.stopping",
    "merge_fsdp_weights": "fsdplaunch.checkpoint.merge",
    "DistModule": "fsdplaunch.runtime.reference",
    "apply_fsdp2": "fsdplaunch.runtime.reference",
    "disable_fsdp_ram_efficient_loading": "fsdplaunch.runtime.reference",
    "enable_fsdp_ram_efficient_loading": "fsdplaunch.runtime.reference",
    "fsdp2_load_full_state_dict": "fsdplaunch.runtime.reference",
    "fsdp2_prepare_auto_wrap_policy": "fsdplaunch.runtime.reference",
    "fsdp2_prepare_model": "fsdplaunch.runtime.reference",
    "fsdp2_switch_optimizer_parameters": "fsdplaunch.runtime.reference",
    "load_state_dict": "fsdplaunch.runtime.reference",
    "full_optim_state_dict": "fsdplaunch.runtime.optim_states",
    "rekey_optim_state_dict": "fsdplaunch.runtime.optim_states",
    "scatter_full_optim_state_dict": "fsdplaunch.runtime.optim_states",
    "shard_full_optim_state_dict": "fsdplaunch.runtime.optim_states",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  (names of the lazy table)

if TYPE_CHECKING:
    from fsdplaunch.checkpoint.merge import merge_fsdp_weights
    from fsdplaunch.runtime.description import describe
    from fsdplaunch.runtime.full_parameters import apply, summon_full_params
    from fsdplaunch.runtime.gradients import clip_grad_norm_, clip_grad_value_, no_sync
    from fsdplaunch.runtime.loading.load import load_weights
    from fsdplaunch.runtime.members import fsdp_modules, named_buffers, named_parameters, params_with_grad
    from fsdplaunch.runtime.optim_states import (
        full_optim_state_dict,
        rekey_optim_state_dict,
        scatter_full_optim_state_dict,
        shard_full_optim_state_dict,
    )
    from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin
    from fsdplaunch.runtime.prepare import prepare
    from fsdplaunch.runtime.reference import (
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
    from fsdplaunch.runtime.state import load_checkpoint, save_checkpoint
    from fsdplaunch.runtime.state_kind import state_dict_type
    from fsdplaunch.runtime.stopping import should_stop


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    if home.startswith("fsdplaunch.runtime."):
        from fsdplaunch.probe.torch_version import refuse_too_old

        refuse_too_old()
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
