"""Have torch's calls for distributed checkpoints work where rank 0 makes them alone, or end with an error.

`get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))` gathers on all ranks: in
`if rank == 0:` it waits for ranks that never come. Under FSDP2 they hand over their shards instead.
"""

import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.collectives.monitored_barrier import monitored_barrier
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.inspection.units import is_over_all_ranks
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.sharding_watch import ever_sharded
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
        once_imported(f"{_PACKAGE}.{module}", functools.partial(_adapt, names=names, make=make))


def _adapt(module: Any, *, names: tuple[str, ...], make: Make) -> None:
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
