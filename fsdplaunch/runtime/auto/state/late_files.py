"""Have a library write a state of the model's size of which rank 0 holds one tensor at a time."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fsdplaunch.runtime.auto.state.gather import ShardGatherer
from fsdplaunch.runtime.auto.state.late_tensors import LateTensor, LateTensors
from fsdplaunch.runtime.auto.state.tensor_files import file_entries, one_by_one, write_file
from fsdplaunch.runtime.patch import replaced

_NAMES = ("save_file", "safe_save_file")
"""What libraries call safetensors' function: they keep it from when they were imported."""


def late_gatherer(call: str, *, keep: bool) -> ShardGatherer:
    """Return what gathers for a library's save: tensors when they are written, in that order.

    Args:
        call: The script's, which all workers must make, or rank 0 alone.
        keep: Whether this rank writes.
    """
    gathering = ShardGatherer(call, keep=keep)
    gathering.late = LateTensors(lambda: gathering.together)
    return gathering


@contextmanager
def writing_late(gathering: ShardGatherer, doing: str) -> Iterator[None]:
    """Run what writes, on the rank that does; the other ranks help to gather until it is done.

    Args:
        gathering: Of `late_gatherer`, with all tensors given to it.
        doing: What is done, to complete "cannot ...".

    Raises:
        CheckpointError: On all ranks that take part, if it fails.
    """
    late = gathering.late
    if not isinstance(late, LateTensors):
        raise TypeError
    with gathering.finish(doing):
        if gathering.keep:
            with late.asking(), _streaming_files():
                yield
        else:
            yield
            late.answer()


@contextmanager
def _streaming_files() -> Iterator[None]:
    """Let safetensors' `save_file`, wherever it is known, write late tensors one after the other."""
    import safetensors.torch as safe

    known = {safe.save_file, inspect.unwrap(safe.save_file)}
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            for name in _NAMES:
                if _is_any_of(getattr(module, "__dict__", {}).get(name), known):
                    stack.enter_context(replaced(module, name, streaming))
        yield


def _is_any_of(value: Any, functions: set[Any]) -> bool:
    return any(value is each for each in functions)


def streaming(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return safetensors' `save_file` that writes late tensors one after the other."""

    @functools.wraps(save)
    def save_file(tensors: Mapping[str, Any], filename: Any, metadata: Any = None, **more: Any) -> Any:
        if more or not _is_late(tensors) or not one_by_one(tensors):
            return save(tensors, filename, metadata=metadata, **more)
        entries = file_entries(tensors)
        return write_file(Path(filename), entries, metadata, (_values(tensors[each.name]) for each in entries))

    return save_file


def _is_late(tensors: Mapping[str, Any]) -> bool:
    """Return whether some tensors of a file are late, and it holds nothing but tensors."""
    values = tensors.values()
    return any(isinstance(value, LateTensor) for value in values) and all(
        isinstance(value, torch.Tensor) for value in values
    )


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.values() if isinstance(tensor, LateTensor) else tensor
