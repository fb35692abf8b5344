"""Record what a script computes of its first batches, between what models return and the losses.

Needed because a graph shows what has gradients only, and not what its constants were computed of: the calls
themselves are made again, with the rows of all ranks, to see whether the loss is that of one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from fsdplaunch.runtime.auto.losses.first_batches.numbers import may_be_read
from fsdplaunch.runtime.auto.losses.first_batches.program import (
    READING,
    Call,
    Given,
    Input,
    Made,
    Program,
    Read,
    mapped,
    marks,
    name_of,
    results_of,
    sliced,
)
from fsdplaunch.runtime.patch import original_of
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.function_modes import put_below, take_off
from fsdplaunch.runtime.torch_internals.operators import exchanges
from fsdplaunch.runtime.torch_internals.tensors import change_count, is_function_transforms, is_in_transform

LARGEST, MOST_BYTES = 32 << 20, 256 << 20
"""Of a tensor that is kept, and of all; what is computed from others is not looked at."""
MOST_CALLS, LOOKS, MOST_BACKWARDS = 5000, 4, 64
"""Calls of a recording, backward passes after the last new loss, and all of them."""
_OPAQUE = ("batch_norm", "instance_norm", "backward", "grad", "register_hook", "checkpoint")
"""What changes more than it returns, or stands for a pass of its own.

So are exchanges between ranks, by which the sum of a shard's elements becomes that of the parameter's.
"""


class Recorder(TorchFunctionMode):
    """The calls since the last backward.

    Attributes:
        is_on: Whether calls are recorded now.
        ended: Whether it is never on again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_on = self.ended = False
        self._begun = False
        self._backwards, self._until = 0, LOOKS
        self._resumed: list[bool] = []
        self._handles: list[RemovableHandle] = []
        self.forget()

    def begin(self) -> None:
        """Record from now on, outside of modules; not inside of a function of torch."""
        if self._passed:
            self.forget()
        if self.ended:
            self.remove()
        elif not self._begun:
            self._begun = self.is_on = True
            put_below(self)
            self._handles += [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]

    def note_backward(self) -> None:
        """Note that a backward has begun: what was computed before it is forgotten when the next batch is read."""
        self._backwards += 1
        self._passed = not self.ended
        if self._backwards == min(self._until, MOST_BACKWARDS):
            self.end()

    def note_new_loss(self) -> None:
        """Note that this backward is of a loss that was not seen before: the next ones are looked at, too."""
        self._until = self._backwards + 1 + LOOKS

    def end(self) -> None:
        """Record nothing any more; the mode itself goes with the next `begin` or `remove`."""
        self.is_on, self.ended = False, True
        self.forget()
        while self._handles:
            self._handles.pop().remove()

    def remove(self) -> None:
        """Take away what is installed; not inside of a function of torch."""
        if not self.ended:
            self.end()
        if self._begun:
            self._begun = False
            take_off(self)

    def forget(self) -> None:
        """Forget the calls so far: what they made is given from now on."""
        self.calls: list[Call] = []
        self.inputs: list[Input] = []
        self._marks: Any = WeakIdKeyDictionary()
        self._read: dict[float, int] = {}
        self._passed = False
        self._bytes = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing for as long as this lasts, as while a batch is read."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before and not self.ended

    def watch(self, model: nn.Module) -> None:
        """Record what the forward of a sharded model itself computes, between its own parts."""
        if not self.ended:
            self._handles.append(model.register_forward_pre_hook(self._resume))

    def _enter(self, module: nn.Module, _args: Any) -> None:
        """Pause in a module that has parameters or buffers: what it computes is its own."""
        self._resumed.append(self.is_on)
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            self.is_on = False

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._resumed:
            self.is_on = self._resumed.pop() and not self.ended

    def _resume(self, _module: nn.Module, _args: Any) -> None:
        if len(self._resumed) == 1:
            self.is_on = self._resumed[0] and not self.ended

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call, and record it."""
        func = original_of(func)  # torch gives what stands in its place, which has run by now
        kwargs = kwargs or {}
        if not self.is_on or len(self.calls) >= MOST_CALLS or torch.compiler.is_compiling() or is_in_transform():
            return func(*args, **kwargs)
        with self.paused():
            return self._recorded(func, args, kwargs)

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = name_of(func)
        opaque = name in _OPAQUE or exchanges(func) or _is_opaque(args, kwargs)
        call = None if opaque else self._call(func, args, kwargs)
        drawn = torch.get_rng_state()
        result = func(*args, **kwargs)
        if call is None or not torch.equal(drawn, torch.get_rng_state()):
            self._forget_results(result)
        elif name in READING:
            self._note_read(call, result)
        else:
            self._note_made(call, name, result, args)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Call:
        mark = partial(self._mark, name_of(func))
        marked = mapped(mark, args), mapped(mark, kwargs)
        return Call(func, *marked, torch.is_grad_enabled(), _autocast(args), script_line())

    def _mark(self, function: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            mark = self._marks.get(value)
            return self._given(value) if mark is None else mark
        if type(value) in (int, float) and value in self._read and may_be_read(function, value):
            return Read(self._read[value], value)
        return value

    def _given(self, tensor: torch.Tensor) -> Given:
        size = tensor.numel() * tensor.element_size()
        kept = size <= LARGEST and self._bytes + size <= MOST_BYTES
        self._bytes += size if kept else 0
        value = _copied(tensor) if kept and isinstance(tensor, nn.Parameter) else tensor
        self.inputs.append(Input(value if kept else None, change_count(value)))
        mark = Given(len(self.inputs) - 1)
        self._marks[tensor] = mark
        return mark

    def _note_read(self, call: Call, result: Any) -> None:
        self.calls.append(call)
        if type(result) in (int, float):
            self._read[result] = len(self.calls) - 1

    def _note_made(self, call: Call, name: str, result: Any, args: Any) -> None:
        tensors = [
            (place, each) for place, each in enumerate(results_of(result)) if isinstance(each, torch.Tensor)
        ]
        changes = name == "__setitem__"
        if not tensors and not changes:
            return
        call.fractions = any(tensor.is_floating_point() for _, tensor in tensors)
        self.calls.append(call)
        number = len(self.calls) - 1
        for place, tensor in tensors:
            self._marks[tensor] = Made(number, place)
        if changes:
            self._marks[args[0]] = Made(number, -1)

    def _forget_results(self, result: Any) -> None:
        for each in results_of(result):
            if isinstance(each, torch.Tensor):
                self._marks.pop(each, None)

    def call_of(self, tensor: torch.Tensor) -> Call | None:
        """Return the call that has made a tensor; None where none was recorded."""
        made = self._marks.get(tensor)
        return self.calls[made.call] if isinstance(made, Made) and self.is_on else None

    def program_of(self, loss: torch.Tensor) -> Program | None:
        """Return the calls that a loss was computed by; None where they were not recorded."""
        made = self._marks.get(loss)
        return sliced(self.calls, made) if isinstance(made, Made) else None


def _copied(param: nn.Parameter) -> torch.Tensor:
    """Return a parameter's values, for the memory of a gathered one is given back after the pass."""
    return param.detach().clone().requires_grad_(param.requires_grad)


def _autocast(args: Any) -> tuple[str, torch.dtype] | None:
    kind = next((each.device.type for each in marks(args) if isinstance(each, torch.Tensor)), "cpu")
    casts = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return (kind, torch.get_autocast_dtype(kind)) if casts else None


def _is_opaque(args: Any, kwargs: Any) -> bool:
    """Return whether a call is not to be made again: it draws by a generator, or has other than plain tensors."""
    given = list(marks(args, kwargs))
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    return any(isinstance(each, torch.Generator) for each in given) or any(
        isinstance(each, DTensor) or each.is_meta or each.is_inference() or is_function_transforms(each)
        for each in tensors
    )
