"""What each step of this worker takes, written where the launcher reads it: nothing is sent, nothing waits for it.

A step is a round of optimizer steps: it begins anew when an optimizer steps that has stepped in it before. So a
GAN's two optimizers make one step together, an optimizer for each parameter as well, and passes that only add up
gradients none. What is not measured here a rank spends computing.

On a GPU the host runs ahead: moments are events in the stream that trains, and what lies between them is read a
step later, when they have gone by.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import nan
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdplaunch.config.resolve import uses_xla
from fsdplaunch.config.schema.config import Config
from fsdplaunch.files import PROCESS, read_size
from fsdplaunch.runtime.patch import once_imported, replace, wrap, wrap_once_imported
from fsdplaunch.runtime.rank import configured_data_ranks, rank, world_size
from fsdplaunch.runtime.torch_internals.tensors import NEXT_BATCH, STATE_BEGUN, WAITS, call_after_backward
from fsdplaunch.step_record import Step, StepWriter

_MEMORY_SECONDS = 1.0
"""How often memory is asked for: the system's answer takes as long as many other measurements."""
_FIRST_STEPS = 32  # after each of which it is, for a short run
_DEPTH = 4  # how far inside a batch its first tensor may be
_MOST_PENDING = 256  # steps that a GPU may be behind


class HostClock:
    """Moments of a worker that computes on the CPU."""

    moment = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._main = threading.main_thread().ident

    def trains_here(self) -> bool:
        """Return whether what is called now belongs to the training, and not to a save in the background."""
        return threading.get_ident() == self._main

    def is_past(self, _moment: float) -> bool:
        """Return whether what lies before a moment can be read."""
        return True

    def between(self, begin: float, end: float) -> float:
        """Return the seconds from one moment to another."""
        return end - begin

    def memory(self) -> tuple[float, float]:
        """Return the bytes in use, and the most there were."""
        return read_size(PROCESS, "VmRSS") or nan, read_size(PROCESS, "VmHWM") or nan


class GpuClock:
    """Moments in the stream of a worker that computes on a GPU."""

    def __init__(self) -> None:
        self.stream = torch.cuda.current_stream()

    def moment(self) -> Any:
        """Return this moment; None while a graph is captured, whose events belong to it."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def trains_here(self) -> bool:
        """Return whether what is called now belongs to the training: not to other streams, or Python's threads."""
        thread = threading.current_thread()  # that of a backward pass is none of Python's
        is_pass = thread is threading.main_thread() or thread.name.startswith("Dummy-")
        return is_pass and bool(torch.cuda.current_stream() == self.stream)

    def is_past(self, moment: Any) -> bool:
        """Return whether what lies before a moment can be read."""
        return moment is None or bool(moment.query())

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds from one moment to another."""
        return nan if begin is None or end is None else float(begin.elapsed_time(end)) / 1000

    def memory(self) -> tuple[float, float]:
        """Return the bytes in use, and the most there were."""
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


class _Made(NamedTuple):
    """A step that has been made, and that a GPU may not have computed yet."""

    number: int
    ended: float
    begin: Any
    end: Any
    waits: Sequence[tuple[Any, Any]]
    data: float
    memory: tuple[float, float]
    samples: float
    tokens: float
    norm: torch.Tensor | None
    skipped: float


class Measuring:
    """The present step of this worker, and what is called where it does something that is measured."""

    def __init__(self, writer: StepWriter, *, share: float = 1.0, only_counts: bool = False) -> None:
        """Measure; of what a loader gives so much counts, where several ranks are given the same."""
        self.clock: Any = HostClock()
        self._writer, self._share, self._only_counts = writer, share, only_counts
        self._round: set[int] = set()
        self._calls, self._trains = 0, True
        self._begin: Any = None
        self._pending: deque[_Made] = deque(maxlen=_MOST_PENDING)
        self._memory, self._memory_time = (nan, nan), 0.0
        self._reset()

    def _reset(self) -> None:
        self._waits: list[tuple[Any, Any]] = []
        self._data = self._samples = self._tokens = self._skipped = 0.0
        self._norm: torch.Tensor | None = None
        self._waiting = self._reading = self._asked = False  # also where an exception has left them

    def note_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that an optimizer has stepped."""
        if not self._trains:
            return
        self._calls += 1
        key = id(optimizer)
        if self._round and key not in self._round:
            self._round.add(key)
            return
        if not self._round and not self._only_counts:
            self._choose_clock(optimizer)
        self._round = {key}
        now = time.time()
        self._writer.count(now)
        if not self._only_counts:
            self._end_step(now)

    def begin_state(self, original: Callable[..., Any], *args: Any) -> None:
        """Stand for what steps an optimizer only to give it its state: no step of the training."""
        self._trains = False
        try:
            original(*args)
        finally:
            self._trains = True

    def begin_training(self, original: Callable[..., Any], called: Any, args: Any, state: Any, *rest: Any) -> Any:
        """Stand for the first of what a Trainer calls, which knows how many steps it will make."""
        self._writer.total = self._writer.made + max(0, int(state.max_steps) - int(state.global_step))
        return original(called, args, state, *rest)

    def _choose_clock(self, optimizer: Optimizer) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        gpu = next((param.device for param in params if param.is_cuda), None)
        if gpu is not None:
            self.clock = GpuClock()
            self._writer.memory_limit = torch.cuda.get_device_properties(gpu).total_memory
            self._waits.clear()
            replace(torch.cuda, "Stream.wait_event", self.timed_event)

    def _end_step(self, now: float) -> None:
        end, made = self.clock.moment(), self._writer.made
        if (moment := time.monotonic()) - self._memory_time >= _MEMORY_SECONDS or made < _FIRST_STEPS:
            self._memory, self._memory_time = self.clock.memory(), moment
        of_step = (self._data, self._memory, self._samples, self._tokens, self._norm, self._skipped)
        self._pending.append(_Made(made, now, self._begin, end, self._waits, *of_step))
        self._begin = end
        self._reset()
        self.write()

    def write(self) -> None:
        """Write the steps that are computed."""
        clock = self.clock
        while self._pending and clock.is_past(self._pending[0].end):
            made = self._pending.popleft()
            self._writer.add(
                Step(
                    made.number,
                    made.ended,
                    seconds=nan if made.begin is None else clock.between(made.begin, made.end),
                    data_seconds=made.data,
                    peer_seconds=sum([clock.between(*wait) for wait in made.waits]),
                    memory_bytes=made.memory[0],
                    peak_bytes=made.memory[1],
                    samples=made.samples or nan,
                    tokens=made.tokens or nan,
                    gradient_norm=nan if made.norm is None else float(made.norm),
                    skipped=made.skipped,
                )
            )

    def timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for a function that waits for other ranks."""
        is_compiling = torch.compiler.is_compiling

        def wait(*args: Any, **kwargs: Any) -> Any:
            clock = self.clock
            if self._waiting or is_compiling() or not clock.trains_here():
                return original(*args, **kwargs)
            self._waiting = True
            begin = clock.moment()
            try:
                return original(*args, **kwargs)
            finally:
                self._waits.append((begin, clock.moment()))
                self._waiting = False

        return wait

    def timed_event(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for `torch.cuda.Stream.wait_event`: so FSDP has the stream that trains wait."""
        timed = self.timed(original)
        return lambda stream, event: (timed if stream == self.clock.stream else original)(stream, event)

    def watch_replicas(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
        """Stand for the constructor of DistributedDataParallel, which waits in C++ at the end of a backward pass.

        It does so after what a hook in the pass has asked to be called there, and before what that asks for then.
        """
        original(model, *args, **kwargs)

        def ask(_gradient: torch.Tensor) -> None:
            if not self._asked:
                self._asked = True
                call_after_backward(begin)

        def begin() -> None:
            self._asked = False
            if not self._waiting and self.clock.trains_here():
                self._waiting = True
                start = self.clock.moment()
                call_after_backward(lambda: end(start))

        def end(start: Any) -> None:
            self._waits.append((start, self.clock.moment()))
            self._waiting = False

        trained = [param for param in model.parameters() if param.requires_grad]
        for param in {trained[0], trained[-1]}:  # a pass that leaves one out uses the other
            param.register_hook(ask)

    def read(self, original: Callable[..., Any], batches: Any) -> Any:
        """Stand for `next` of a loader's iterator; of one that reads another the outer one counts."""
        if self._reading or not self.clock.trains_here():
            return original(batches)
        self._reading = True
        waits, begin = len(self._waits), time.perf_counter()
        try:
            batch = original(batches)
        finally:
            self._data += time.perf_counter() - begin
            if isinstance(self.clock, HostClock):  # a sampler may have waited for rank 0's order
                self._data -= sum([self.clock.between(*wait) for wait in self._waits[waits:]])
            self._reading = False
        if torch.is_grad_enabled():
            self._count(batch)
        return batch

    def _count(self, batch: Any) -> None:
        for _ in range(_DEPTH):
            if isinstance(batch, torch.Tensor):
                break
            if isinstance(batch, Mapping):
                batch = batch["input_ids"] if "input_ids" in batch else next(iter(batch.values()), None)
            elif isinstance(batch, list | tuple) and batch:
                batch = batch[0]
        if isinstance(batch, torch.Tensor) and batch.ndim:
            self._samples += len(batch) * self._share
            if batch.ndim == 2 and not batch.is_floating_point() and batch.dtype != torch.bool:  # noqa: PLR2004
                self._tokens += batch.numel() * self._share

    def clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand for what clips gradients and returns their norm."""
        found = norm = original(*args, **kwargs)
        if placements := getattr(norm, "placements", None):  # of a part of it others know the rest
            norm = norm.to_local() if all(each.is_replicate() for each in placements) else None
        if isinstance(norm, torch.Tensor) and norm.numel() == 1:
            self._norm = norm.detach().to("cpu", non_blocking=True)  # read a step later
        return found

    def scale(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand for `GradScaler.step`, which leaves an optimizer's step out when gradients have overflowed."""
        before = self._calls
        result = original(scaler, optimizer, *args, **kwargs)
        if self._calls == before:
            self._skipped = 1.0
            self.note_step(optimizer)
        return result


_running: list[Measuring] = []


def measure(writer: StepWriter, config: Config) -> None:
    """Measure this process from now on: by torch's own hook for steps, and where all waiting passes."""
    size = world_size()
    readers = 1 if config.launch.keep_global_batch else configured_data_ranks(config, rank=rank(), size=size).size
    only_counts = not config.launch.measure or uses_xla(config)
    measuring = Measuring(writer, share=readers / size, only_counts=only_counts)
    register_optimizer_step_post_hook(measuring.note_step)
    wrap_once_imported(*STATE_BEGUN, measuring.begin_state)
    trainer = "transformers.trainer_callback", "CallbackHandler.on_train_begin"
    wrap_once_imported(*trainer, measuring.begin_training)
    if only_counts:
        return
    _running.append(measuring)
    for module, path in WAITS:
        once_imported(module, partial(replace, path=path, make=measuring.timed))
    wrap(*NEXT_BATCH, measuring.read)
    wrap(torch.amp.grad_scaler, "GradScaler.step", measuring.scale)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        wrap(owner, "clip_grad_norm_", measuring.clip)
    wrap_once_imported("fsdplaunch.runtime.api.gradients", "clip_grad_norm_", measuring.clip)
    wrap_once_imported("torch.distributed.fsdp", "FullyShardedDataParallel.clip_grad_norm_", measuring.clip)
    wrap(torch.nn.parallel, "DistributedDataParallel.__init__", measuring.watch_replicas)


def finish() -> None:
    """Write what is left at the end of the script, which waits for its GPU anyway."""
    for measuring in _running:
        with suppress(RuntimeError):  # the GPU is in no state to answer
            if isinstance(measuring.clock, GpuClock):
                torch.cuda.synchronize()
            measuring.write()
