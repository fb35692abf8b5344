"""Models that PyTorch/XLA's two classes have wrapped: their names, parameters, gradients and optimizers."""

import copy
import functools
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdplaunch.checkpoint.readers.xla_files import own_name
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.patch import once_imported
from fsdplaunch.runtime.sharding_watch import mark_sharded
from fsdplaunch.runtime.torch_internals.modules import is_xla_shard, name_in_unit


def wrapper_classes() -> tuple[type, type]:
    """Return PyTorch/XLA's class of one process per device, and that of SPMD."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    return XlaFullyShardedDataParallel, SpmdFullyShardedDataParallel


def watch_wrappers() -> None:
    """Notice from now on when one of them is built.

    SPMD's is given a model that has been moved: it would make several of a parameter that modules share. Its
    function for outputs is ours in place of transformers', which knows one kind only.
    """
    import torch_xla

    from fsdplaunch.runtime.xla.devices import split_output

    def notice(wrapper: Any, *, moves: bool) -> None:
        construct = wrapper.__init__

        @functools.wraps(construct)
        def construct_and_mark(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            if moves:
                move_model(module, torch_xla.device())
            if getattr(kwargs.get("shard_output"), "__module__", "") == "transformers.trainer":
                kwargs["shard_output"] = split_output
            construct(self, module, *args, **kwargs)
            mark_sharded(wrapper.__name__)

        wrapper.__init__ = construct_and_mark

    per_device, spmd = wrapper_classes()
    notice(per_device, moves=False)
    notice(spmd, moves=True)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device of another kind, and keep parameters shared: torch makes new ones there."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    model.to(device)
    for first, *others in names.values():
        for name in others:
            home, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(home), leaf, model.get_parameter(first))


def parameters_after(wrapped: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameter that holds each of the user's now; several may share one, where they are flattened."""
    per_device, _ = wrapper_classes()
    if not any(isinstance(module, per_device) for module in wrapped.modules()):
        return {own_name(name): param for name, param in wrapped.named_parameters(remove_duplicate=False)}
    found: dict[str, nn.Parameter] = {}
    for place, module in wrapped.named_modules():
        unit: Any = module
        for shard in unit.sharded_params if isinstance(module, per_device) else ():
            name = name_in_unit(shard)
            home, _, leaf = name.rpartition(".")
            names = [name]
            if leaf.startswith("flat_param_"):
                names, _, _ = unit.get_submodule(home.removesuffix(".")).metadata(int(leaf.rpartition("_")[2]))
            found |= {own_name(".".join(filter(None, (place, each)))): shard for each in names}
    return found


def shared_names(wrapped: nn.Module) -> set[str]:
    """Return further names of parameters that have several, which a wrapped model does not hold again."""
    per_device, _ = wrapper_classes()
    found = set[str]()
    for place, module in wrapped.named_modules():
        unit: Any = module
        for home, _, _, name, _, _ in unit.shared_full_param_infos if isinstance(module, per_device) else ():
            found.add(own_name(".".join(filter(None, (place, home, name)))))
    return found


def repoint(optimizer: Optimizer, known: dict[int, tuple[str, nn.Module]]) -> None:
    """Have an optimizer train what its parameters became; their names and wrapped models are known by id."""
    after: dict[int, dict[str, nn.Parameter]] = {}
    taken: set[int] = set()
    for group in optimizer.param_groups:
        new: dict[int, nn.Parameter] = {}
        for param in group["params"]:
            if id(param) not in known:
                continue
            name, wrapped = known[id(param)]
            here = after.setdefault(id(wrapped), parameters_after(wrapped))
            new[id(here[name])] = here[name]
        if not new:
            continue
        if optimizer.state or taken & set(new):
            what = "has state already" if optimizer.state else "splits flattened parameters over its groups"
            msg = f"{type(optimizer).__name__} {what}, which PyTorch/XLA's FSDP cannot take over"
            raise ShardingError(msg, hint="build the optimizer after fsdplaunch.prepare(model)")
        taken |= set(new)
        group["params"] = list(new.values())


def clip_norm(parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor | None:
    """Clip by the norm over all processes; None for what this class does not shard."""
    per_device = wrapper_classes()[0]
    model: Any = parameters
    if isinstance(parameters, per_device):
        norm: torch.Tensor = model.clip_grad_norm_(max_norm, norm_type)
        return norm
    if isinstance(parameters, nn.Module):
        return None
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(map(is_xla_shard, given)):
        msg = "the norm of PyTorch/XLA's shards is not the norm of the model"
        raise ShardingError(msg, hint="give clip_grad_norm_ the model that prepare returned")
    return None


def unsynchronized(model: nn.Module) -> AbstractContextManager[Any] | None:
    """Return what keeps a model's gradients from being exchanged; None for what this class does not shard."""
    wrapper: Any = model
    return wrapper.no_sync() if isinstance(model, wrapper_classes()[0]) else None


def configure_trainer(config: Config) -> None:
    """Fill `fsdp` and `fsdp_config` of training arguments that a script leaves empty; later imports included.

    The Trainer reads PyTorch/XLA's keys from its own arguments only, and no environment variable.
    """
    own = trainer_arguments(config)

    def fill_later(module: Any) -> None:
        arguments = module.TrainingArguments
        finish = arguments.__post_init__
        # The control group of the CPU gives rise to an advice to use DDP, which is left out.
        advice = "parallel_mode != ParallelMode.DISTRIBUTED"
        logging.getLogger(arguments.__module__).addFilter(lambda record: advice not in record.getMessage())

        @functools.wraps(finish)
        def fill_and_finish(self: Any) -> None:
            if not self.fsdp and not self.fsdp_config:
                self.fsdp, self.fsdp_config = "full_shard auto_wrap", copy.deepcopy(own)
                messages.say("TrainingArguments: fsdp and fsdp_config are the configuration's")
            if str(self.optim).endswith("adamw_torch_fused"):  # transformers' default with a new torch
                self.optim = "adamw_torch"
                messages.say("TrainingArguments: optim is adamw_torch, PyTorch/XLA has no fused one")
            finish(self)

        arguments.__post_init__ = fill_and_finish

    once_imported("transformers.training_args", fill_later)


def trainer_arguments(config: Config) -> dict[str, Any]:
    """Return the configuration as the `fsdp_config` of transformers' training arguments."""
    fsdp = config.fsdp_config
    settings = dict(fsdp.xla_fsdp_settings)
    if (dtype := {"bf16": "bfloat16", "fp16": "float16"}.get(config.precision.param or "")) is not None:
        settings.setdefault("compute_dtype", dtype)
        settings.setdefault("fp32_reduce_scatter", config.precision.reduce == "fp32")
    found: dict[str, Any] = {
        "xla": True,
        "xla_fsdp_v2": fsdp.xla_fsdp_v2,
        "xla_fsdp_settings": settings,
        "xla_fsdp_grad_ckpt": fsdp.xla_fsdp_grad_ckpt or fsdp.fsdp_activation_checkpointing,
    }
    if fsdp.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        found["min_num_params"] = fsdp.fsdp_min_num_params
    elif fsdp.fsdp_auto_wrap_policy == "NO_WRAP":
        found["transformer_layer_cls_to_wrap"] = []
    elif fsdp.fsdp_transformer_layer_cls_to_wrap:
        found["transformer_layer_cls_to_wrap"] = list(fsdp.fsdp_transformer_layer_cls_to_wrap)
    return found
