"""What stands in the place of torch's and Python's own functions in one worker: the whole list, by rule."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, stateless
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from fsdplaunch.runtime.auto import HookContext, ddp, full_values, saves, torch_calls, torch_function
from fsdplaunch.runtime.auto.batch import loaders
from fsdplaunch.runtime.auto.batch.streams import seed_ranks
from fsdplaunch.runtime.auto.model import adopt_models, forward_backward, parameters
from fsdplaunch.runtime.auto.rank0 import service
from fsdplaunch.runtime.auto.rank0.position import track_position
from fsdplaunch.runtime.auto.working_tree import WorkingTree, rank_0_having_the_tree
from fsdplaunch.runtime.patch import once_imported, replaced
from fsdplaunch.runtime.sharding.optimizers import stepping_with_local_shards
from fsdplaunch.runtime.torch_internals.modules import SEND_STATES, TOTAL_NORM

_StandIn = Callable[..., Any]
_REPLACED: tuple[tuple[Any, str, _StandIn], ...] = (
    # The model: it is sharded where it is first moved, compiled, given to an optimizer or trained.
    (nn.Module, "__init__", adopt_models.note_module),
    (nn.Module, "__setstate__", adopt_models.note_module),
    (nn.Module, "to", adopt_models.move),
    (nn.Module, "cuda", adopt_models.move_to_gpu),
    (nn.Module, "to_empty", adopt_models.give_storage),
    (torch, "compile", adopt_models.compile_model),
    (torch.cuda, "set_device", adopt_models.set_gpu),
    (Optimizer, "__init__", adopt_models.build_optimizer),
    (Optimizer, "add_param_group", adopt_models.extend_optimizer),
    # A shard: outside of passes `parameters()` gives shards, never what is gathered for a pass.
    (nn.Module, "named_parameters", parameters.name_parameters),
    (nn.Module, "apply", parameters.apply),
    (nn.Module, "register_parameter", parameters.register_parameter),
    (DTensor, "register_hook", parameters.register_hook),
    # The batch: a loader gives each worker its share; what ranks decide by is the same on all.
    (DataLoader, "__iter__", loaders.read),
    (DataLoader, "__len__", loaders.measure),
    (nn.Module, "train", loaders.turn),
    (ReduceLROnPlateau, "step", loaders.step_by_mean),
    (nn.SyncBatchNorm, "forward", loaders.normalise),
    # The batch: gradients that torch would lose are computed; a divided pass draws alike when computed again.
    (torch.autograd, "backward", forward_backward.backward),
    (torch.autograd, "grad", forward_backward.grad),
    # A shard is clipped by its full norm and printed in full; `functional_call` computes with what it is given.
    (utils, "clip_grad_norm_", torch_calls.clip),
    (utils, "clip_grad_value_", torch_calls.clip),
    (clip_grad, "clip_grad_norm_", torch_calls.clip),
    (clip_grad, "clip_grad_value_", torch_calls.clip),
    (clip_grad, TOTAL_NORM, torch_calls.total_norm),
    (utils, "get_total_norm", torch_calls.total_norm),
    (DTensor, "__repr__", torch_function.show),
    (torch.func, "functional_call", full_values.functional_call),
    (stateless, "functional_call", full_values.functional_call),
    # Files: saves hold full tensors, once; models leave as what they were; what is loaded is cut to shards.
    (torch, "save", saves.torch_save),
    (DTensor, "__reduce_ex__", saves.reduce_shard),
    (nn.Module, "__copy__", saves.copy_module),
    (torch.jit, "trace", saves.export),
    (torch.onnx, "export", saves.export),
    (torch.export, "export", saves.export),
    (nn.Module, "load_state_dict", saves.load_model),
    (Optimizer, "load_state_dict", saves.load_optimizer),
    # Rank 0 alone: it gets full states; other workers answer where they wait for it.
    (nn.Module, "state_dict", service.state_dict),
    (Optimizer, "state_dict", service.state_dict),
    (DTensor, "full_tensor", full_values.read_full_tensor),
    # DDP scripts: what they give to DistributedDataParallel is sharded, and ranks that they spawn run in this one.
    (DistributedDataParallel, "__init__", ddp.construct),
    (*SEND_STATES, ddp.send_all_but_shards),
    (torch.multiprocessing, "spawn", ddp.spawn_ranks),
    (sys.modules["torch.multiprocessing.spawn"], "spawn", ddp.spawn_ranks),
    (BaseProcess, "start", ddp.start_process),
)
"""What is replaced, and the function of this package that stands there.

It is given the original, the context, and what it is called with.
"""
_WHEN_IMPORTED: tuple[tuple[str, str, _StandIn], ...] = (
    ("safetensors.torch", "save", saves.safe_bytes),
    ("safetensors.torch", "save_file", saves.safe_file),
    ("safetensors.torch", "save_model", saves.safe_model),
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer.__init__", ddp.build_zero),
)


@contextmanager
def hooks(hook_context: HookContext) -> Iterator[HookContext]:
    """Install the hooks of one worker, in any order, and take them away at the end."""
    with hook_context.undo as undo:
        for owner, name, function in _REPLACED:
            undo.enter_context(replaced(owner, name, _standing(function, hook_context)))
        for module, path, function in _WHEN_IMPORTED:
            once_imported(module, functools.partial(_replace, hook_context, path, function))
        # The model: it is sharded when training begins, where it could not be known before who shards.
        adopt_models.decide_when_training_begins(hook_context)
        # The model: the steps of torch's optimizers compute on local shards.
        undo.enter_context(stepping_with_local_shards())
        # A shard: gradients are placed before a step.
        torch_calls.step_shards(hook_context)
        # A shard reads as its full value, is written by its full shape and stays local with other shards.
        torch_calls.compute_with_shards(hook_context)
        # A shard is not exchanged by the script: it is averaged already.
        torch_calls.refuse_collectives(hook_context)
        # The batch: metrics that libraries add up over ranks count complete rows once.
        loaders.count_rows_once(hook_context)
        # Random numbers: alike until training begins, then by the batch's meaning; seeded, never patched.
        seed_ranks(hook_context.streams, hook_context.size, undo)
        # Files: rank 0 has the working tree.
        undo.enter_context(rank_0_having_the_tree(WorkingTree(hook_context.ownership, hook_context.rank)))
        # Rank 0 alone: what it asks for belongs to the step that the script is at.
        track_position(hook_context)
        yield hook_context


def _replace(hook_context: HookContext, path: str, function: _StandIn, module: Any) -> None:
    owner, _, name = path.rpartition(".")
    owner = getattr(module, owner) if owner else module
    hook_context.undo.enter_context(replaced(owner, name, _standing(function, hook_context)))


def _standing(stand_in: _StandIn, hook_context: HookContext) -> Callable[[Any], Any]:
    """Return what makes a replacement; torch's compiler sees the original."""

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return stand_in(original, hook_context, *args, **kwargs)

        return call if original is None else functools.wraps(original)(call)

    return make
