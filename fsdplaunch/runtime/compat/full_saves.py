"""Have what other libraries save of a sharded model be full weights, written once.

Their calls, on a model that they or the script sharded, write what `state_dict()` holds: flat shards under FSDP1,
and under FSDP2 tensors that safetensors cannot write. Here such a call gathers on all ranks and writes on rank 0.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.compat.trainer_saves import adapt_trainer
from fsdplaunch.runtime.inspection.replace_modules import without_wrappers
from fsdplaunch.runtime.patch import own_attribute
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.state_dict.full_state import check_shapes, full_state, holds_shards
from fsdplaunch.runtime.state_dict.gather import ShardGatherer, gathered
from fsdplaunch.runtime.state_dict.known_state import known_state

_WITH_SAVE_PRETRAINED = {
    "transformers.modeling_utils": "PreTrainedModel",
    "peft.peft_model": "PeftModel",
    "diffusers.models.modeling_utils": "ModelMixin",
    "huggingface_hub.hub_mixin": "ModelHubMixin",
}


def save_full_weights() -> None:
    """Adapt the libraries that save models, if and when the script imports them."""
    for module, name in _WITH_SAVE_PRETRAINED.items():
        once_imported(module, functools.partial(_adapt_model_class, name=name))
    once_imported("huggingface_hub.serialization._torch", _adapt_hub)
    once_imported("accelerate.accelerator", _adapt_accelerator)
    once_imported("transformers.trainer", adapt_trainer)


def _adapt_model_class(module: Any, *, name: str) -> None:
    kind = getattr(module, name)
    kind.save_pretrained = _saving_full(kind.save_pretrained)


def _saving_full(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return `save_pretrained` for a model that may be sharded."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, nn.Module) or not holds_shards(self) or _saves_shards(self, kwargs):
            return save(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        given = _given_state(call)
        given = known_state(self) if given is None else given  # which is what its state_dict() is, too
        if given is None or any(isinstance(value, DTensor) for value in given.values()):
            return _gather_and_save(save, self, given, call)
        check_shapes(given, self, "save_pretrained")
        if not given and rank() != 0:
            return None
        with without_wrappers(self):
            return save(self, *args, **kwargs)

    return save_pretrained


def _saves_shards(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether transformers itself has sharded this model, or is to write its shards."""
    native = getattr(getattr(model, "config", None), "distributed_config", None)
    return bool(kwargs.get("distributed_checkpoint") or native)


def _given_state(call: inspect.BoundArguments) -> Mapping[str, Any] | None:
    """Return the state that the script gives to be saved; None when it leaves that to the model."""
    given: Mapping[str, Any] | None = call.arguments.get("state_dict")
    return call.kwargs.get("state_dict") if given is None else given


def _give_state(call: inspect.BoundArguments, state: Mapping[str, Any]) -> None:
    """Let a call save this state, by whichever place the script gave its own."""
    if "state_dict" in call.arguments:
        call.arguments["state_dict"] = state
        return
    further = next(each.name for each in call.signature.parameters.values() if each.kind is each.VAR_KEYWORD)
    call.arguments[further] = call.arguments[further] | {"state_dict": state}


def _gather_and_save(
    save: Callable[..., Any], model: nn.Module, given: Mapping[str, Any] | None, call: inspect.BoundArguments
) -> Any:
    """Gather on all ranks, save on rank 0; under FSDP2 one tensor at a time."""
    gathering = ShardGatherer("save_pretrained", keep=rank() == 0, spool=True)
    if given is None:
        full = full_state(model, "save_pretrained", gathering)
    else:
        full = gathered(given, gathering)
        _give_state(call, full)
    with gathering.finish("write what save_pretrained was given"):
        if rank() != 0:
            return None
        check_shapes(full, model, "save_pretrained")
        given_by_model = own_attribute(model, "state_dict", lambda *_, **__: dict(full))
        with given_by_model, without_wrappers(model):  # not every library takes a state as an argument
            return save(*call.args, **call.kwargs)


def _adapt_hub(serialization: Any) -> None:
    save = getattr(serialization, "save_torch_state_dict", None)  # which save_torch_model calls, too
    if save is None:  # before 0.24
        return

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


def _adapt_accelerator(accelerator: Any) -> None:
    kind = accelerator.Accelerator
    get_state, save, save_model = kind.get_state_dict, kind.save, kind.save_model

    @functools.wraps(get_state)
    def get_full_state(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            full_state(model, "get_state_dict") if holds_shards(model) else get_state(self, model, *args, **kwargs)
        )

    @functools.wraps(save)
    def save_full(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, Mapping) and any(isinstance(value, DTensor) for value in obj.values()):
            obj = gathered(obj, ShardGatherer("accelerator.save", keep=rank() == 0, spool=True))
        return save(self, obj, *args, **kwargs)

    @functools.wraps(save_model)
    def save_full_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_shards(model):
            return save_model(self, model, *args, **kwargs)
        gathering = ShardGatherer("save_model", keep=rank() == 0, spool=True)
        state = full_state(model, "save_model", gathering)
        with (
            gathering.finish("write what save_model was given"),
            own_attribute(self, "get_state_dict", lambda *_, **__: state),
        ):
            return save_model(self, model, *args, **kwargs)

    kind.get_state_dict, kind.save, kind.save_model = get_full_state, save_full, save_full_model
