"""Tell where a script cuts its batch into parts by the rows' position: the first ten to adapt, the others to test.

Needed because each rank has its own rows only, and its first ten are not the batch's. Parts that a loop treats
alike, one after the other, give the same gradients together, and are not told.
"""

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.row_order import tell_once, trains_on_batch
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import is_user_file
from fsdplaunch.runtime.torch_internals.modules import CALL_METHOD

_CUT = "rows of the batch are taken by their position: each rank takes them of its own rows"
_FUNCTIONS = ("chunk", "split", "tensor_split")


Place = tuple[CodeType, int]
"""An instruction: its function, and where in it."""


class Part(NamedTuple):
    """Rows from `start` to before `stop`, of `rows`."""

    rows: int
    start: int
    stop: int


@contextmanager
def telling_cut_batches(hook_context: HookContext) -> Iterator[None]:
    """Look at what takes a part of as many rows as this rank has of a batch."""
    if not hook_context.keeps_batch or hook_context.data.size == 1:
        yield
        return
    cuts = _Cuts(hook_context)
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.Tensor, "__getitem__", cuts.slicing))
        for owner in (torch, torch.Tensor):
            for name in _FUNCTIONS:
                stack.enter_context(replaced(owner, name, cuts.parting))
        yield


class _Cuts:
    """Which parts each instruction of the script took."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context
        self.parts: dict[Place, set[Part]] = {}
        self.told: set[Place] = set()

    def slicing(self, original: Any) -> Callable[..., Any]:
        """Make the method that `x[:10]` calls."""
        sizes = self.hook_context.batches.sizes

        @wraps(original)
        def take(tensor: Any, index: Any) -> Any:
            first = index[0] if type(index) is tuple and index else index
            if type(first) is slice and type(tensor) is torch.Tensor and tensor.dim() and len(tensor) in sizes:
                self._sliced(len(tensor), first, sys._getframe(1))
            return original(tensor, index)

        return take

    def parting(self, original: Any) -> Callable[..., Any]:
        """Make `chunk` and the like, whose parts are told where they get names of their own at once."""
        sizes = self.hook_context.batches.sizes

        @wraps(original)
        def cut(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else None
            along = kwargs.get("dim", args[2] if len(args) > 2 else 0)  # noqa: PLR2004
            if type(tensor) is torch.Tensor and tensor.dim() and along == 0 and len(tensor) in sizes:
                frame = sys._getframe(1)
                if self._is_script(frame) and _unpacked(frame):
                    self._tell()
            return original(*args, **kwargs)

        return cut

    def _sliced(self, rows: int, asked: slice, frame: FrameType) -> None:
        start, stop, step = asked.indices(rows) if _is_plain(asked) else (0, rows, 1)
        together = rows * self.hook_context.data.size
        past = any(rows < end < together for end in _ends(asked))
        if step != 1 or (stop - start >= rows and not past) or not self._is_script(frame):
            return
        part, place = Part(rows, start, stop), (frame.f_code, frame.f_lasti)
        seen = self.parts.setdefault(place, set())
        seen.add(part)
        if past or (_count(seen, rows) == 1 and self._is_rest(part)):
            self.told.add(place)
            self._tell()

    def _is_rest(self, part: Part) -> bool:
        """Return whether another instruction took the other rows, and always those: no loop takes one by one."""
        others = {Part(part.rows, 0, part.start), Part(part.rows, part.stop, part.rows)}
        took = [seen for place, seen in self.parts.items() if place not in self.told]
        return any(_count(seen, part.rows) == 1 and others & seen for seen in took)

    def _is_script(self, frame: FrameType) -> bool:
        """Return whether the script itself takes rows of what it trains on, in no model's pass."""
        ours = is_user_file(frame.f_code.co_filename) and trains_on_batch(self.hook_context)
        return ours and not any(code is _PASS for code in _callers(frame))

    def _tell(self) -> None:
        tell_once(self.hook_context, "cut", _CUT)


_PASS = getattr(nn.Module, CALL_METHOD).__code__


def _callers(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _count(parts: set[Part], rows: int) -> int:
    return sum(part.rows == rows for part in parts)


def _is_plain(asked: slice) -> bool:
    return all(end is None or isinstance(end, int) for end in (asked.start, asked.stop, asked.step))


def _ends(asked: slice) -> list[int]:
    """Return up to where a slice's first row, and all of its rows, need there to be rows."""
    first = [asked.start + 1] if isinstance(asked.start, int) else []
    return [*first, asked.stop] if isinstance(asked.stop, int) else first


def _unpacked(frame: FrameType) -> bool:
    """Return whether what a call returns is given to several names: `a, b = x.chunk(2)`."""
    after = (each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti)
    following = next(after, None)
    return following is not None and following.opname == "UNPACK_SEQUENCE"
