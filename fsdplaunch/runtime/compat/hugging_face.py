"""Have transformers, peft, diffusers and the hub save full weights of a sharded model, once.

Their calls, on a model that they or the script sharded, write what `state_dict()` holds: flat shards under FSDP1,
and under FSDP2 tensors that safetensors cannot write. Here such a call gathers on all ranks and writes on rank 0.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.inspection.units import without_wrappers
from fsdplaunch.runtime.patch import once_imported, own_attribute, wrap_once_imported
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.state_dict.full_state import (
    check_shapes,
    full_state,
    holds_shards,
    knowing_state,
    known_state,
)
from fsdplaunch.runtime.state_dict.gather import ShardGatherer, gathered

_TRAINER = "transformers.trainer"
_WITH_SAVE_PRETRAINED = {
    "transformers.modeling_utils": "PreTrainedModel",
    "peft.peft_model": "PeftModel",
    "diffusers.models.modeling_utils": "ModelMixin",
    "huggingface_hub.hub_mixin": "ModelHubMixin",
}


def adapt_hugging_face() -> None:
    """Adapt the libraries that save models, if and when the script imports them."""
    for module, name in _WITH_SAVE_PRETRAINED.items():
        wrap_once_imported(module, f"{name}.save_pretrained", _save_pretrained)
    once_imported("huggingface_hub.serialization._torch", _adapt_hub)
    wrap_once_imported("accelerate.accelerator", "Accelerator.get_state_dict", _get_full_state)
    wrap_once_imported("accelerate.accelerator", "Accelerator.save", _save_full)
    wrap_once_imported("accelerate.accelerator", "Accelerator.save_model", _save_full_model)
    wrap_once_imported(_TRAINER, "Trainer.save_model", _save_model)
    wrap_once_imported(_TRAINER, "Trainer.evaluation_loop", _evaluate)
    wrap_once_imported(_TRAINER, "Trainer.train", _train)
    wrap_once_imported(_TRAINER, "unwrap_model", _unwrap_outermost)


def _save_pretrained(save: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Save full weights of shards: under FSDP2 gathered on all ranks one tensor at a time, written on rank 0."""
    own = getattr(getattr(self, "config", None), "distributed_config", None) or kwargs.get(
        "distributed_checkpoint"
    )
    if own or not isinstance(self, nn.Module) or not holds_shards(self):  # transformers itself shards, too
        return save(self, *args, **kwargs)
    call = inspect.signature(save).bind(self, *args, **kwargs)
    given: Mapping[str, Any] | None = call.arguments.get("state_dict")
    given = call.kwargs.get("state_dict") if given is None else given
    known = known_state(self) if given is None else given  # which is what its state_dict() is, too
    if known is not None and not any(isinstance(value, DTensor) for value in known.values()):
        check_shapes(known, self, "save_pretrained")
        if not known and rank() != 0:
            return None
        with without_wrappers(self):
            return save(self, *args, **kwargs)
    gathering = ShardGatherer("save_pretrained", keep=rank() == 0, spool=True)
    full = full_state(self, "save_pretrained", gathering) if known is None else gathered(known, gathering)
    if known is not None and "state_dict" in call.arguments:
        call.arguments["state_dict"] = full
    elif known is not None:
        further = next(each.name for each in call.signature.parameters.values() if each.kind is each.VAR_KEYWORD)
        call.arguments[further] = call.arguments[further] | {"state_dict": full}
    with gathering.finish("write what save_pretrained was given"):
        if rank() != 0:
            return None
        check_shapes(full, self, "save_pretrained")
        given_by_model = own_attribute(self, "state_dict", lambda *_, **__: dict(full))
        with given_by_model, without_wrappers(self):  # not every library takes a state as an argument
            return save(*call.args, **call.kwargs)


def _adapt_hub(serialization: Any) -> None:
    save = serialization.save_torch_state_dict  # which save_torch_model calls, too

    @functools.wraps(save)
    def save_full_state(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, DTensor) for value in state_dict.values()):
            return save(state_dict, *args, **kwargs)
        gathering = ShardGatherer("save_torch_state_dict", keep=rank() == 0, spool=True)
        full = gathered(state_dict, gathering)
        with gathering.finish("write what save_torch_state_dict was given"):
            return save(full, *args, **kwargs) if rank() == 0 else None

    for module in list(sys.modules.values()):  # the package's own name for it, where it was imported before
        if getattr(module, "__dict__", {}).get("save_torch_state_dict") is save:
            module.__dict__["save_torch_state_dict"] = save_full_state


def _save_model(save: Any, self: Any, output_dir: Any = None, _internal_call: bool = False) -> Any:
    """Let the Trainer save the model where it is to keep checkpoints as shards: when asked, and at the end.

    Checkpoints before the last stay shards, as configured.
    """
    plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
    is_last = self.state.global_step >= self.state.max_steps or self.control.should_training_stop
    if plugin is None or (_internal_call and not is_last and "FULL_STATE_DICT" not in str(plugin.state_dict_type)):
        return save(self, output_dir, _internal_call)
    full = StateDictType.FULL_STATE_DICT  # the plugin's kind is all that `save_model` looks at before it gathers
    write = functools.partial(_write_known, self)
    with own_attribute(plugin, "state_dict_type", full), own_attribute(self, "_save", write):
        return save(self, output_dir, _internal_call)


def _write_known(trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a Trainer write its model in its own way, which need not look at the state that was gathered for it.

    sentence-transformers' saves each of its modules by itself. On the rank that writes: transformers calls it
    there only, or, in newer versions, on all ranks, to return at once on the others.
    """
    state, write = kwargs.get("state_dict"), type(trainer)._save
    if state is None or not holds_shards(trainer.model):
        return write(trainer, *args, **kwargs)
    if not trainer.args.should_save:
        return None
    with knowing_state(trainer.model, state):
        return write(trainer, *args, **kwargs)


def _get_full_state(get_state: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    return full_state(model, "get_state_dict") if holds_shards(model) else get_state(self, model, *args, **kwargs)


def _save_full(save: Any, self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(obj, Mapping) and any(isinstance(value, DTensor) for value in obj.values()):
        obj = gathered(obj, ShardGatherer("accelerator.save", keep=rank() == 0, spool=True))
    return save(self, obj, *args, **kwargs)


def _save_full_model(save_model: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not holds_shards(model):
        return save_model(self, model, *args, **kwargs)
    gathering = ShardGatherer("save_model", keep=rank() == 0, spool=True)
    state = full_state(model, "save_model", gathering)
    with (
        gathering.finish("write what save_model was given"),
        own_attribute(self, "get_state_dict", lambda *_, **__: state),
    ):
        return save_model(self, model, *args, **kwargs)


def _evaluate(loop: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a Trainer evaluate before it trains: accelerate shards by FSDP2 with an optimizer only."""
    accelerator = self.accelerator
    if not getattr(accelerator, "is_fsdp2", False) or accelerator._models:
        return loop(self, *args, **kwargs)
    prepare_both = accelerator.prepare

    def prepare(model: nn.Module) -> Any:
        prepared, _ = prepare_both(model, torch.optim.SGD(model.parameters(), lr=0.0))
        accelerator._optimizers.pop()
        return prepared

    with own_attribute(accelerator, "prepare", prepare):
        return loop(self, *args, **kwargs)


def _train(train: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a Trainer train what FSDP1 has sharded for an evaluation, whose wrapper it forgets."""
    if isinstance(self.model, FullyShardedDataParallel):
        self.model_wrapped = self.model
    return train(self, *args, **kwargs)


def _unwrap_outermost(unwrap: Any, model: nn.Module, recursive: bool = False) -> Any:
    """Let the Trainer of transformers 4 keep the wrappers that gather a model's flat shards."""
    return model if recursive else unwrap(model)
