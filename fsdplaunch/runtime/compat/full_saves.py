"""Have what other libraries save of a sharded model be full weights, written once.

Their calls, on a model that they or the script sharded, write what `state_dict()` holds: flat shards under FSDP1,
and under FSDP2 tensors that safetensors cannot write. Here such a call gathers on all ranks and writes on rank 0.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.state.gather import ShardGatherer, gathered
from fsdplaunch.runtime.auto.state.late_files import late_gatherer, writing_late
from fsdplaunch.runtime.collectives.hang_detector import watch_main_thread
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.sharding_events import on_sharding
from fsdplaunch.runtime.state_dict.full_state import check_shapes, full_state, holds_shards, remember_wrappers

_WITH_SAVE_PRETRAINED = {
    "transformers.modeling_utils": "PreTrainedModel",
    "peft.peft_model": "PeftModel",
    "diffusers.models.modeling_utils": "ModelMixin",
    "huggingface_hub.hub_mixin": "ModelHubMixin",
}


def save_full_weights() -> None:
    """Adapt the libraries that save models, if and when the script imports them."""
    remember_wrappers()
    on_sharding(watch_main_thread)  # a save that only some ranks make is told from where the others wait
    for module, name in _WITH_SAVE_PRETRAINED.items():
        once_imported(module, functools.partial(_adapt_model_class, name=name))
    once_imported("accelerate.accelerator", _adapt_accelerator)
    once_imported("transformers.trainer", _adapt_trainer)


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
        if given is None or any(isinstance(value, DTensor) for value in given.values()):
            return _gather_and_save(save, self, given, call)
        check_shapes(given, self, "save_pretrained")
        return save(self, *args, **kwargs) if given or rank() == 0 else None

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
    gathering = late_gatherer("save_pretrained", keep=rank() == 0)
    if given is None:
        full = full_state(model, "save_pretrained", gathering)
    else:
        full = gathered(given, gathering)
        _give_state(call, full)
    with writing_late(gathering, "write what save_pretrained was given"):
        if rank() != 0:
            return None
        check_shapes(full, model, "save_pretrained")
        with _state_of(model, full):
            return save(*call.args, **call.kwargs)


@contextmanager
def _state_of(model: nn.Module, full: Mapping[str, Any]) -> Iterator[None]:
    """Let `model.state_dict()` return full tensors for a while: not every library takes them as an argument."""
    before = model.__dict__.get("state_dict")
    model.__dict__["state_dict"] = lambda *_, **__: dict(full)
    try:
        yield
    finally:
        del model.__dict__["state_dict"]
        if before is not None:
            model.__dict__["state_dict"] = before


def _adapt_accelerator(accelerator: Any) -> None:
    kind = accelerator.Accelerator
    get_state, save = kind.get_state_dict, kind.save

    @functools.wraps(get_state)
    def get_full_state(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            full_state(model, "get_state_dict") if holds_shards(model) else get_state(self, model, *args, **kwargs)
        )

    @functools.wraps(save)
    def save_full(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, Mapping) and any(isinstance(value, DTensor) for value in obj.values()):
            obj = gathered(obj, ShardGatherer("accelerator.save", keep=rank() == 0))
        return save(self, obj, *args, **kwargs)

    kind.get_state_dict, kind.save = get_full_state, save_full


def _adapt_trainer(trainer: Any) -> None:
    """Let the Trainer save the model where it was told to keep checkpoints as shards: when asked, and at the end.

    Checkpoints before the last stay shards, as configured.
    """
    kind = trainer.Trainer
    save = kind.save_model

    @functools.wraps(save)
    def save_model(self: Any, output_dir: Any = None, _internal_call: bool = False) -> Any:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None or (_internal_call and not _is_last(self)):
            return save(self, output_dir, _internal_call)
        with _as_full(plugin):
            return save(self, output_dir, _internal_call)

    kind.save_model = save_model


def _is_last(trainer: Any) -> bool:
    """Return whether training ends after this checkpoint."""
    return bool(trainer.state.global_step >= trainer.state.max_steps or trainer.control.should_training_stop)


@contextmanager
def _as_full(plugin: Any) -> Iterator[None]:
    """Show a plugin's kind of state dict as full: all that `save_model` looks at before it gathers."""
    from torch.distributed.fsdp import StateDictType

    kept, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = kept
