"""Have transformers' Trainer leave a model that loads, whatever its checkpoints are, one tensor at a time."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fsdplaunch.runtime.patch import own_attribute
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.state_dict.full_state import full_state, holds_shards
from fsdplaunch.runtime.state_dict.gather import ShardGatherer
from fsdplaunch.runtime.state_dict.known_state import knowing_state

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
    gathering = ShardGatherer("save_model", keep=rank() == 0, spool=True)
    get_state = trainer.accelerator.get_state_dict
    awaited = False

    def gather(model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal awaited
        if not holds_shards(model):
            return get_state(model, *args, **kwargs)
        awaited = True
        return full_state(model, "save_model", gathering)

    def write(*args: Any, **kwargs: Any) -> Any:
        nonlocal awaited
        awaited = False
        with gathering.finish(_WRITING):
            return save(trainer, *args, **kwargs)

    with ExitStack() as stack:
        if type(trainer)._save is save:
            stack.enter_context(own_attribute(trainer.accelerator, "get_state_dict", gather))
            stack.enter_context(own_attribute(trainer, "_save", write))
        else:
            stack.enter_context(own_attribute(trainer, "_save", functools.partial(_write_known, trainer)))
        yield
    if awaited and rank() != 0:
        with gathering.finish(_WRITING):  # transformers 4 calls `_save` on rank 0 only
            pass


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
