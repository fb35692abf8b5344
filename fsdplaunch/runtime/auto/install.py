"""Install all hooks of one worker; the modules of those that few scripts meet are loaded when one is called."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import stateless
from torch.optim import Optimizer

from fsdplaunch.runtime.auto.batch.loaders import identical_across_ranks, sharing_loaders
from fsdplaunch.runtime.auto.batch.streams import seeding_ranks
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.adopt_models import sharding_models
from fsdplaunch.runtime.auto.model.forward_backward import watching_backward
from fsdplaunch.runtime.auto.model.parameters import refusing_renames, showing_shards
from fsdplaunch.runtime.auto.rank0.position import tracking_position
from fsdplaunch.runtime.auto.rank0.service import giving_full_states
from fsdplaunch.runtime.auto.torch_calls import computing_with_shards, refusing_collectives, stepping_shards
from fsdplaunch.runtime.auto.working_tree import WorkingTree, rank_0_having_the_tree
from fsdplaunch.runtime.patch import replaced, replaced_once_imported
from fsdplaunch.runtime.sharding.optimizers import stepping_with_local_shards
from fsdplaunch.runtime.torch_internals.modules import SEND_STATES

_WHEN_CALLED: tuple[tuple[Any, str, str], ...] = (
    # A shard: printing shows its full value, and `functional_call` computes with the tensors that it is given.
    (DTensor, "__repr__", "torch_function.show"),
    (torch.func, "functional_call", "full_values.functional_call"),
    (stateless, "functional_call", "full_values.functional_call"),
    # Files: saves hold full tensors, once; models leave as what they were; what is loaded is cut to shards.
    (torch, "save", "saves.torch_save"),
    (DTensor, "__reduce_ex__", "saves.reduce_shard"),
    (nn.Module, "__copy__", "saves.copy_module"),
    (torch.jit, "trace", "saves.export"),
    (torch.onnx, "export", "saves.export"),
    (torch.export, "export", "saves.export"),
    (nn.Module, "load_state_dict", "saves.load_model"),
    (Optimizer, "load_state_dict", "saves.load_optimizer"),
    # DDP scripts: what they give to DistributedDataParallel is sharded, and ranks that they spawn run in this one.
    (DistributedDataParallel, "__init__", "ddp.construct"),
    (*SEND_STATES, "ddp.send_all_but_shards"),
    (torch.multiprocessing, "spawn", "ddp.spawn_ranks"),
    (sys.modules["torch.multiprocessing.spawn"], "spawn", "ddp.spawn_ranks"),
    (BaseProcess, "start", "ddp.start_process"),
)
"""What is replaced from the start, by a function of this package that is loaded at its first call."""
_WHEN_IMPORTED = (
    ("safetensors.torch", "save", "saves.safe_bytes"),
    ("safetensors.torch", "save_file", "saves.safe_file"),
    ("safetensors.torch", "save_model", "saves.safe_model"),
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer.__init__", "ddp.build_zero"),
)


@contextmanager
def hooks(hook_context: HookContext) -> Iterator[HookContext]:
    """Install the hooks of one worker, in any order, and take them away at the end."""
    contexts = (
        # The model: shard it where it is first compiled, moved, given to an optimizer or trained.
        sharding_models(hook_context),
        # The model: what a script took from it before stands for its shards; these keep their names.
        refusing_renames(hook_context),
        # A shard: outside of passes `parameters()` gives shards, never what is gathered for a pass.
        showing_shards(hook_context),
        # The model: the steps of torch's optimizers compute on local shards.
        stepping_with_local_shards(),
        # A shard: gradients are placed before a step, and clipped by their full norm.
        stepping_shards(hook_context),
        # The batch: gradients that torch would lose are computed; a divided pass draws alike when computed again.
        watching_backward(hook_context),
        # The batch: a loader gives each worker its share, or all of them the global batch.
        sharing_loaders(hook_context),
        # Random numbers: alike until training begins, then by the batch's meaning; seeded, never patched.
        seeding_ranks(hook_context.streams, hook_context.size),
        # The batch: what ranks decide by, running statistics and validation losses, is the same on all.
        identical_across_ranks(hook_context),
        # A shard reads as its full value, is written by its full shape and stays local with other shards.
        computing_with_shards(hook_context),
        # A shard is not exchanged by the script: it is averaged already.
        refusing_collectives(hook_context),
        # Files: rank 0 has the working tree.
        rank_0_having_the_tree(WorkingTree(hook_context.ownership, hook_context.rank)),
        # Rank 0 alone: what it asks for belongs to the step that the script is at.
        tracking_position(hook_context),
        # Rank 0 alone: it gets full states; other workers answer where they wait for it.
        giving_full_states(),
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        for owner, name, function in _WHEN_CALLED:
            stack.enter_context(replaced(owner, name, _loading(function, hook_context)))
        for module, path, function in _WHEN_IMPORTED:
            stack.enter_context(replaced_once_imported(module, path, _loading(function, hook_context)))
        stack.enter_context(hook_context.undo)
        yield hook_context


def _loading(function: str, hook_context: HookContext) -> Callable[[Any], Any]:
    """Return what makes a replacement that is loaded when it is first called."""
    module, _, name = function.rpartition(".")

    def make(original: Any) -> Any:
        made: list[Any] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not made:
                if torch.compiler.is_compiling():
                    return original(*args, **kwargs)
                loaded = import_module(f"fsdplaunch.runtime.auto.{module}")
                made.append(getattr(loaded, name)(original, hook_context))
            return made[0](*args, **kwargs)

        return call if original is None else functools.wraps(original)(call)

    return make
