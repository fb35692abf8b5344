"""Have transformers' Trainer leave a model that loads, whatever its checkpoints are, one tensor at a time."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fsdplaunch.runtime.auto.patch import own_attribute
from fsdplaunch.runtime.auto.state.late_files import late_gatherer, writing_late
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.state_dict.full_state import full_state, holds_shards

_WRITING = "write what save_model was given"


def adapt_trainer(trainer: Any) -> None:
    """Let the Trainer save the model where it was told to keep checkpoints as shards: when asked, and at the end.

    Checkpoints before the last stay shards, as configured.

    Args:
        trainer: The module `transformers.trainer`.
    """
    kind = trainer.Trainer
    save = kind.save_model

    @functools.wraps(save)
    def save_model(self: Any, output_dir: Any = None, _internal_call: bool = False) -> Any:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None or (_internal_call and not _is_last(self) and not _is_full(plugin)):
            return save(self, output_dir, _internal_call)
        with _as_full(plugin), _one_by_one(self, kind._save):
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


def _is_full(plugin: Any) -> bool:
    return "FULL_STATE_DICT" in str(plugin.state_dict_type)


@contextmanager
def _one_by_one(trainer: Any, save: Callable[..., Any]) -> Iterator[None]:
    """Let a Trainer gather its model while it writes it, unless the script writes it in a way of its own.

    Args:
        trainer: The script's.
        save: Its class's `_save`, to which `save_model` gives the state that it has gathered.
    """
    gathering = late_gatherer("save_model", keep=rank() == 0)
    get_state = trainer.accelerator.get_state_dict
    due: list[bool] = []  # not empty while what was gathered is to be written

    def gather(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_shards(model):
            return get_state(model, *args, **kwargs)
        state = full_state(model, "save_model", gathering)
        due.append(True)
        return state

    def write(*args: Any, **kwargs: Any) -> Any:
        due.clear()
        with writing_late(gathering, _WRITING):
            return save(trainer, *args, **kwargs)

    with ExitStack() as stack:
        if type(trainer)._save is save:
            stack.enter_context(own_attribute(trainer.accelerator, "get_state_dict", gather))
            stack.enter_context(own_attribute(trainer, "_save", write))
        yield
        if due and not gathering.keep:  # until transformers 4 only rank 0 comes to `_save`, which needs the others
            with writing_late(gathering, _WRITING):
                pass
