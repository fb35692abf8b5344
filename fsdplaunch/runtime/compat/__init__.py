"""Everything that torch's own FSDP, accelerate, transformers and Lightning need from us in a run that shards.

Each library's part is imported when the library is: a script pays for what it uses.
"""

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.tensor import DTensor

from fsdplaunch.config.schema.config import Config
from fsdplaunch.runtime.collectives.waits import monitored_barrier, watch_main_thread
from fsdplaunch.runtime.compat.fsdp1 import construct_on_cpu, gather_with_all_ranks
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, is_over_all_ranks, is_unit
from fsdplaunch.runtime.patch import before_import, once_imported, own_attribute, wrap, wrap_once_imported
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.sharding_watch import ever_sharded, on_sharding
from fsdplaunch.runtime.state_dict.gather import ShardGatherer, files_of_ranks
from fsdplaunch.runtime.torch_internals.fsdp import gathered_now, group_refs
from fsdplaunch.runtime.torch_internals.tensors import tree_map

_HUGGING_FACE = ("accelerate", "transformers", "peft", "diffusers", "huggingface_hub")
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def adapt_libraries(config: Config, *, on_cpu: bool) -> None:
    """Adapt torch now, and other libraries if and when the script imports them."""
    from fsdplaunch.runtime.state_dict.full_state import remember_wrappers

    @functools.cache
    def adapt_hugging_face_libraries() -> None:
        from fsdplaunch.runtime.compat.accelerate import adapt_accelerate
        from fsdplaunch.runtime.compat.hugging_face import adapt_hugging_face

        adapt_hugging_face()
        adapt_accelerate(keeps=config.launch.keep_global_batch, on_cpu=on_cpu)

    for package in _HUGGING_FACE:
        before_import(package, adapt_hugging_face_libraries)
    for package in _LIGHTNING if on_cpu else ():
        before_import(package, adapt_lightning_to_cpu)
    checkpoint_with_all_ranks()
    remember_wrappers()
    if on_cpu:
        wrap(Wrapper, "__init__", construct_on_cpu)
    gather_with_all_ranks()
    answer_fsdp1_calls()
    clear_gradients_of_shards()
    on_sharding(watch_main_thread)  # where others wait shows a call that only some ranks make


_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
"""Module and class of what checks a strategy, the Trainer's and Fabric's, under both names of the package."""


def adapt_lightning_to_cpu() -> None:
    """Have Lightning take its FSDP strategies on a CPU, if and when the script imports it.

    `FSDPStrategy` runs there, but the connectors that choose Lightning's parts refuse it for any accelerator but
    CUDA's. For workers whose device is the CPU, before the script runs.
    """

    def check_as_on_gpu(check: Any, self: Any) -> None:
        with own_attribute(self, "_accelerator_flag", "cuda"):  # looked at for this alone
            check(self)

    for module, name in _CONNECTORS.items():
        wrap_once_imported(module, f"{name}._check_strategy_and_fallback", check_as_on_gpu)


_PACKAGE = "torch.distributed.checkpoint"
_HINT = (
    "take it, or the library's call around it, such as accelerator.load_state, out of `if rank == 0:`, because"
    " every rank writes or reads its part; or give no_dist=True"
)


def checkpoint_with_all_ranks() -> None:
    """Have torch's calls for distributed checkpoints work where rank 0 makes them alone, or end with an error.

    `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))` gathers on all ranks: in
    `if rank == 0:` it waits for ranks that never come. Under FSDP2 they hand over their shards instead.
    """
    states = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict")
    for name, functions, call in (
        ("state_dict", states, _get_full),
        ("state_dict_saver", ("save", "async_save"), _meet_and_call),
        ("state_dict_loader", ("load",), _meet_and_call),
    ):
        once_imported(f"{_PACKAGE}.{name}", functools.partial(_wrap_functions, functions=functions, call=call))


def _wrap_functions(module: Any, *, functions: tuple[str, ...], call: Callable[..., Any]) -> None:
    package = sys.modules.get(_PACKAGE)
    for name in functions:
        function = getattr(module, name)
        wrap(module, name, call)
        if getattr(package, name, None) is function:  # the package has it under its own name, too
            setattr(package, name, getattr(module, name))


def _meet_and_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _in_main_thread_of_several() and not kwargs.get("no_dist") and _is_of_all(kwargs.get("process_group")):
        monitored_barrier(f"{_PACKAGE}.{function.__name__}", _HINT)
    with files_of_ranks():
        return function(*args, **kwargs)


def _in_main_thread_of_several() -> bool:
    """Return whether all ranks may be asked to come: threads write beside a main thread that goes on."""
    main = threading.current_thread() is threading.main_thread()
    return main and ever_sharded() and dist.is_initialized() and dist.get_world_size() > 1


def _is_of_all(group: Any) -> bool:
    return group is None or dist.get_world_size(group) == dist.get_world_size()


def _get_full(get: Callable[..., Any], model: nn.Module, *args: Any, options: Any = None, **kwargs: Any) -> Any:
    full = options is not None and options.full_state_dict and _in_main_thread_of_several()
    if not full or not any(isinstance(p, DTensor) and is_over_all_ranks(p) for p in model.parameters()):
        return get(model, *args, options=options, **kwargs)
    gathering = ShardGatherer(get.__name__, keep=rank() == 0)
    gathering.call = get.__name__  # ranks may make it at different lines
    gathering.meet()
    if gathering.together:
        return get(model, *args, options=options, **kwargs)
    parts = dataclasses.replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
    with gathering.finish(f"gather for {get.__name__}"):
        return tree_map(gathering.full_or_own, get(model, *args, options=parts, **kwargs))


def answer_fsdp1_calls() -> None:
    """Have FSDP1's calls work with a model that FSDP2 shards.

    Scripts written for FSDP1 gather by `FSDP.state_dict_type(model, ...)` and `FSDP.summon_full_params(model)`. Of
    a model that FSDP2 shards these do nothing, and the first ends with `KeyError: None` when its block is left.
    """
    wrap(Wrapper, "state_dict_type", functools.partial(_call_for, _typed))
    wrap(Wrapper, "summon_full_params", functools.partial(_call_for, _summoned))


def _call_for(units: Any, wrappers: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call torch's function for FSDP1's models and all others, and ours for those that only FSDP2 shards."""
    only_units = any(map(is_unit, module.modules())) and not fsdp1_wrappers(module)
    return (units if only_units else wrappers)(module, *args, **kwargs)


def _typed(
    module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> Any:
    from fsdplaunch.runtime.state_dict.state_dict_type import state_dict_type as ours

    if state_dict_config is None and state_dict_type is StateDictType.FULL_STATE_DICT:
        state_dict_config = FullStateDictConfig()  # torch's own: on every rank
    return ours(module, state_dict_type, state_dict_config, optim_state_dict_config)


def _summoned(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    from fsdplaunch.runtime.api.summon_full_params import summon_full_params as ours

    return ours(module, *args, **kwargs)


def clear_gradients_of_shards() -> None:
    """Let `model.zero_grad()` clear the shards' gradients between a pass and its backward, whoever sharded it.

    FSDP2 leaves the outermost unit gathered there, so `model.parameters()` are tensors that have no gradients yet.
    What `zero_grad` is to clear is with the shards: without this it is added to the next gradient, in silence.
    """
    wrap(nn.Module, "zero_grad", _clear_both)


def _clear_both(clear: Any, self: nn.Module, set_to_none: bool = True) -> None:
    from fsdplaunch.runtime.sharding.registry import models_of

    clear(self, set_to_none)
    # Gathered by itself or as a part of a larger unit.
    pairs = [
        pair for model in (self, *models_of(nn.Module)) for ref in _groups_of(model) for pair in gathered_now(ref)
    ]
    own = {id(param) for param in self.parameters()} if pairs else set()
    for shard in (shard for gathered, shard in pairs if id(gathered) in own):
        if set_to_none:
            shard.grad = None
        elif shard.grad is not None:
            with torch.no_grad():
                shard.grad.detach_().zero_()


_groups: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]" = weakref.WeakKeyDictionary()


def _groups_of(model: nn.Module) -> "list[weakref.ref[Any]]":
    """Return the groups of a model's units; looked up once, because this runs in every step."""
    found = _groups.get(model) or [ref for part in model.modules() if is_unit(part) for ref in group_refs(part)]
    if found:
        _groups[model] = found
    return found
