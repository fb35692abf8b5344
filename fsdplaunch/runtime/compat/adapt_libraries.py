"""Everything that torch's own FSDP, accelerate, transformers and Lightning need from us in a run that shards.

Each library's part is imported when the library is: a script pays for what it uses.
"""

import dataclasses
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.config.schema.config import Config
from fsdplaunch.runtime.collectives.waits import monitored_barrier, watch_main_thread
from fsdplaunch.runtime.inspection.units import is_over_all_ranks, is_unit
from fsdplaunch.runtime.patch import before_import, once_imported, own_attribute
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.sharding_watch import ever_sharded, on_sharding
from fsdplaunch.runtime.state_dict.gather import ShardGatherer, files_of_ranks
from fsdplaunch.runtime.torch_internals.tensors import tree_map

_PACKAGE = "torch.distributed.checkpoint"
_HINT = (
    "take it, or the library's call around it, such as accelerator.load_state, out of `if rank == 0:`, for every"
    " rank writes or reads its part; or give no_dist=True"
)
Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def checkpoint_with_all_ranks() -> None:
    """Adapt torch's functions, if and when something imports them."""
    states = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict")
    for module, names, make in (
        ("state_dict", states, _gathered_or_fetched),
        ("state_dict_saver", ("save",), _by_all_ranks_or_rank_0),
        ("state_dict_saver", ("async_save",), _by_all_ranks),
        ("state_dict_loader", ("load",), _by_all_ranks),
    ):
        once_imported(f"{_PACKAGE}.{module}", functools.partial(_replace_functions, names=names, make=make))


def _replace_functions(module: Any, *, names: tuple[str, ...], make: Make) -> None:
    for name in names:
        function = getattr(module, name)
        instead = make(function)
        for owner in (module, sys.modules.get(_PACKAGE)):
            if owner is not None and getattr(owner, name, None) is function:
                setattr(owner, name, instead)


def _by_all_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def meet_and_call(*args: Any, **kwargs: Any) -> Any:
        if _in_main_thread_of_several() and not kwargs.get("no_dist") and _is_of_all(kwargs.get("process_group")):
            monitored_barrier(f"{_PACKAGE}.{function.__name__}", _HINT)
        with files_of_ranks():
            return function(*args, **kwargs)

    return meet_and_call


def _by_all_ranks_or_rank_0(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return `save` for calls that rank 0 may make alone: it then writes full tensors, which load as shards do.

    Scripts call accelerate's `save_state` so, on the main process.
    """
    signature = inspect.signature(save)

    @functools.wraps(save)
    def meet_and_save(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        if not _in_main_thread_of_several() or given.get("no_dist") or not _is_of_all(given.get("process_group")):
            with files_of_ranks():
                return save(*args, **kwargs)
        gathering = ShardGatherer(save.__name__, keep=True)
        gathering.call = f"{_PACKAGE}.{save.__name__}"  # ranks may make it at different lines
        gathering.meet()
        if gathering.together:
            with files_of_ranks():
                return save(*args, **kwargs)
        with gathering.finish(f"write what {save.__name__} was given"):
            given["state_dict"] = tree_map(gathering.full_or_own, given["state_dict"])
            given |= {"no_dist": True, "process_group": None}
            return save(*call.args, **call.kwargs)

    return meet_and_save


def _in_main_thread_of_several() -> bool:
    """Return whether all ranks may be asked to come: threads write beside a main thread that goes on."""
    main = threading.current_thread() is threading.main_thread()
    return main and ever_sharded() and dist.is_initialized() and dist.get_world_size() > 1


def _is_of_all(group: Any) -> bool:
    return group is None or dist.get_world_size(group) == dist.get_world_size()


def _gathered_or_fetched(get: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get)
    def get_full(model: nn.Module, *args: Any, options: Any = None, **kwargs: Any) -> Any:
        full = options is not None and options.full_state_dict
        if not full or not _in_main_thread_of_several() or not _has_shards(model):
            return get(model, *args, options=options, **kwargs)
        gathering = ShardGatherer(get.__name__, keep=rank() == 0)
        gathering.call = get.__name__  # ranks may make it at different lines
        gathering.meet()
        if gathering.together:
            return get(model, *args, options=options, **kwargs)
        parts = dataclasses.replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
        with gathering.finish(f"gather for {get.__name__}"):
            return tree_map(gathering.full_or_own, get(model, *args, options=parts, **kwargs))

    return get_full


def _has_shards(model: nn.Module) -> bool:
    """Return whether FSDP2 has divided parameters of a model over all ranks."""
    return any(isinstance(param, DTensor) and is_over_all_ranks(param) for param in model.parameters())


def answer_fsdp1_calls() -> None:
    """Replace both on torch's class for models that only FSDP2 shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

    if not hasattr(Wrapper, "fsdplaunch_answers"):
        Wrapper.fsdplaunch_answers = True  # type: ignore[attr-defined]
        Wrapper.state_dict_type = _either(Wrapper.state_dict_type, _typed)  # type: ignore[method-assign]
        Wrapper.summon_full_params = _either(Wrapper.summon_full_params, _summoned)  # type: ignore[method-assign]


def _either(wrappers: Any, units: Any) -> Any:
    """Return torch's function for FSDP1's models and all others, and ours for those of FSDP2."""

    @functools.wraps(wrappers)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        function = units if _only_units(module) else wrappers
        context: AbstractContextManager[None] = function(module, *args, **kwargs)
        return context

    return staticmethod(call)


def _only_units(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    parts = list(module.modules())
    return any(map(is_unit, parts)) and not any(isinstance(part, FullyShardedDataParallel) for part in parts)


@contextmanager
def _typed(
    module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> Iterator[None]:
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType

    from fsdplaunch.runtime.state_dict.state_dict_type import state_dict_type as ours

    if state_dict_config is None and state_dict_type is StateDictType.FULL_STATE_DICT:
        state_dict_config = FullStateDictConfig()  # torch's own: on every rank
    with ours(module, state_dict_type, state_dict_config, optim_state_dict_config):
        yield


@contextmanager
def _summoned(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
    from fsdplaunch.runtime.api.summon_full_params import summon_full_params as ours

    with ours(module, *args, **kwargs):
        yield


def clear_gradients_of_shards() -> None:
    """Have every module's `zero_grad` clear the shards' gradients as well, whoever sharded it."""
    clear = nn.Module.zero_grad
    if hasattr(clear, "__wrapped__"):
        return

    @functools.wraps(clear)
    def clear_both(self: nn.Module, set_to_none: bool = True) -> None:
        clear(self, set_to_none)
        for shard in _shards_behind(self):
            _clear(shard, set_to_none=set_to_none)

    nn.Module.zero_grad = clear_both  # type: ignore[method-assign]


def _shards_behind(module: nn.Module) -> Iterator[Any]:
    """Yield the shards of the parameters that a module has gathered, by itself or as a part of a larger unit."""
    from fsdplaunch.runtime.sharding.registry import models_of
    from fsdplaunch.runtime.torch_internals.fsdp import gathered_now

    refs = [ref for model in (module, *models_of(nn.Module)) for ref in _groups_of(model)]
    pairs = [pair for ref in refs for pair in gathered_now(ref)]
    own = {id(param) for param in module.parameters()} if pairs else set()
    yield from (shard for gathered, shard in pairs if id(gathered) in own)


def _groups_of(model: nn.Module) -> "list[weakref.ref[Any]]":
    """Return the groups of a model's units; what was found once is known, for this stands in every step."""
    from fsdplaunch.runtime.torch_internals.fsdp import group_refs

    if model not in _groups:
        found = [ref for part in model.modules() if is_unit(part) for ref in group_refs(part)]
        if not found:
            return []
        _groups[model] = found
    return _groups[model]


_groups: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]" = weakref.WeakKeyDictionary()


def _clear(shard: Any, *, set_to_none: bool) -> None:
    if shard.grad is None:
        return
    if set_to_none:
        shard.grad = None
    else:
        with torch.no_grad():
            shard.grad.detach_().zero_()


_HUGGING_FACE = ("accelerate", "transformers", "peft", "diffusers", "huggingface_hub")
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def adapt_libraries(config: Config, *, on_cpu: bool) -> None:
    """Adapt torch now, and other libraries if and when the script imports them.

    Args:
        config: The worker's.
        on_cpu: Whether it computes on the CPU.
    """
    adapt = functools.partial(_adapt_hugging_face, keeps=config.launch.keep_global_batch, on_cpu=on_cpu)
    for package in _HUGGING_FACE:
        before_import(package, adapt)
    for package in _LIGHTNING if on_cpu else ():
        before_import(package, _adapt_lightning)
    checkpoint_with_all_ranks()
    _adapt_fsdp1_when_built(on_cpu=on_cpu)
    answer_fsdp1_calls()
    clear_gradients_of_shards()
    on_sharding(watch_main_thread)  # a call that only some ranks make is told from where the others wait


@functools.cache
def _adapt_hugging_face(*, keeps: bool, on_cpu: bool) -> None:
    from fsdplaunch.runtime.compat.accelerate import (
        adapt_accelerate_to_cpu,
        divide_batches_of_accelerate,
        keep_buffers_for_accelerate,
        keep_embeddings_out_of_blocks,
        keep_no_cache_for_accelerate,
        let_save_hooks_take_states,
        split_layers_for_accelerate,
    )
    from fsdplaunch.runtime.compat.hugging_face import save_full_weights, watch_loss

    save_full_weights()
    keep_embeddings_out_of_blocks()
    keep_buffers_for_accelerate()
    keep_no_cache_for_accelerate()
    let_save_hooks_take_states()
    split_layers_for_accelerate()
    once_imported("transformers.trainer", watch_loss)
    if keeps:
        divide_batches_of_accelerate()
    if on_cpu:
        adapt_accelerate_to_cpu()


def _adapt_lightning() -> None:
    adapt_lightning_to_cpu()


def _adapt_fsdp1_when_built(*, on_cpu: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

    build = Wrapper.__init__

    @functools.cache
    def adapted() -> Any:
        now, Wrapper.__init__ = Wrapper.__init__, build  # type: ignore[method-assign]
        _adapt_fsdp1(on_cpu=on_cpu)
        inner, Wrapper.__init__ = Wrapper.__init__, now  # type: ignore[method-assign]
        return inner

    @functools.wraps(build)
    def adapt_and_build(self: Any, *args: Any, **kwargs: Any) -> None:
        adapted()(self, *args, **kwargs)

    Wrapper.__init__ = adapt_and_build  # type: ignore[method-assign]


def _adapt_fsdp1(*, on_cpu: bool) -> None:
    from fsdplaunch.runtime.compat.fsdp1 import gather_with_all_ranks, shard_on_cpu, take_out_offload_to_cpu
    from fsdplaunch.runtime.state_dict.full_state import remember_wrappers

    remember_wrappers()
    if on_cpu:
        take_out_offload_to_cpu()
        shard_on_cpu()
    gather_with_all_ranks()


_CONNECTORS = (
    *(
        (f"{package}.trainer.connectors.accelerator_connector", "_AcceleratorConnector")
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
    *((f"{package}.connector", "_Connector") for package in ("lightning.fabric", "lightning_fabric")),
)
"""Module and class of what checks a strategy, the Trainer's and Fabric's, under both names of the package."""
_CHECK = "_check_strategy_and_fallback"


def adapt_lightning_to_cpu() -> None:
    """Have Lightning take its FSDP strategies on a CPU, if and when the script imports it.

    For workers whose device is the CPU, before the script runs.
    """
    for module, name in _CONNECTORS:
        once_imported(module, functools.partial(_check_as_on_gpu, name=name))


def _check_as_on_gpu(module: Any, *, name: str) -> None:
    connector = getattr(module, name)
    check = getattr(connector, _CHECK)

    @functools.wraps(check)
    def check_as_on_gpu(self: Any) -> None:
        with own_attribute(self, "_accelerator_flag", "cuda"):  # looked at for this alone
            check(self)

    setattr(connector, _CHECK, check_as_on_gpu)
