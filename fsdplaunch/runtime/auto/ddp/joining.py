"""Let `join()` and `Join([...])` end a run whose ranks have unequal numbers of batches.

Needed because every pass of a sharded model needs every rank.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed.algorithms.join import Join

from fsdplaunch.runtime.auto.ddp.forward import Forward
from fsdplaunch.runtime.patch import replaced

_CONTEXT = "fsdplaunch_joining"


@contextmanager
def joining_alike() -> Iterator[None]:
    """Exchange what a Join does that was given a wrapper of a sharded model."""
    with (
        replaced(Join, "__init__", _build),
        replaced(Join, "__enter__", _enter),
        replaced(Join, "__exit__", _exit),
    ):
        yield


def _build(original: Any) -> Any:
    def __init__(self: Any, joinables: Any, enable: bool = True, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        found = [each.__dict__.get("fsdplaunch_forward") for each in joinables]
        ours = [each for each in found if each is not None]
        if ours:
            self.__dict__[_CONTEXT] = _joining(ours if enable else [])
        else:
            original(self, joinables, enable, *args, **kwargs)

    return __init__


@contextmanager
def _joining(forwards: list[Forward]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in forwards:
            stack.enter_context(each.joining())
        yield


def _enter(original: Any) -> Any:
    def __enter__(self: Any) -> Any:  # noqa: N807
        context = self.__dict__.get(_CONTEXT)
        return original(self) if context is None else context.__enter__()

    return __enter__


def _exit(original: Any) -> Any:
    def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807
        context = self.__dict__.get(_CONTEXT)
        return original(self, *error) if context is None else context.__exit__(*error)

    return __exit__
