"""Count the rows and tokens that a script's data loaders give it."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdplaunch.config.schema.config import Config
from fsdplaunch.files import PROCESS, read_size
from fsdplaunch.run_dir import MEASURED, write_json
from fsdplaunch.runtime.check_run import stop_after
from fsdplaunch.runtime.inspection.named_models import NamedModels
from fsdplaunch.runtime.inspection.parameters import named_parameters
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers
from fsdplaunch.runtime.rank import own_folder
from fsdplaunch.runtime.state_dict.full_state import full_shapes
from fsdplaunch.runtime.torch_internals.modules import watch_batches
from fsdplaunch.tune.write_guard import install_guard

_SEQUENCES = 2
"""Dimensions of a batch of token numbers: rows, and tokens in each."""


class BatchCount:
    """What loaders have given since the process began.

    Attributes:
        rows: Of all batches.
        tokens: Of batches of token numbers.
        shape: Rows and tokens per row of the last batch of token numbers; None without one.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.tokens = 0
        self.shape: tuple[int, int] | None = None

    def install(self) -> None:
        """Begin to count, until the process ends."""
        watch_batches(self.count)

    def count(self, batch: Any) -> None:
        """Count one batch by its first tensor; of a mapping, by `input_ids` where it has them."""
        tensor = first_tensor(batch)
        if tensor is None or not tensor.dim():
            return
        self.rows += tensor.shape[0]
        if tensor.dim() == _SEQUENCES and not tensor.is_floating_point():
            self.tokens += tensor.numel()
            self.shape = (tensor.shape[0], tensor.shape[1])


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor in nested lists and mappings, `input_ids` before others; None without one."""
    if isinstance(batch, torch.Tensor):
        return batch
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = [batch["input_ids"]] if "input_ids" in batch else batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


_CALLS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


class CollectiveWait:
    """The time spent in collectives, counted once where one calls another.

    Attributes:
        seconds: Since the process began.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def install(self) -> None:
        """Begin to measure, until the process ends."""
        for name in _CALLS:
            setattr(dist, name, self._timed(getattr(dist, name)))
        setattr(dist.Work, "wait", self._timed(dist.Work.wait))  # noqa: B010  (a method, for mypy)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return timed


def model_facts(optimizer: Optimizer) -> dict[str, Any]:
    """Return the trained model's tensors, its transformers configuration and its optimizer, as plain data.

    Args:
        optimizer: That trains it.

    Returns:
        `tensors`: full shape and bytes per element by name; `config`: the `config.json`, None for other models;
        `optimizer`: the class's name in lower case.
    """
    models = NamedModels()
    models.parameters_of(optimizer)
    tensors: dict[str, Any] = {}
    for root in models.roots:
        tensors |= _tensors(root)
    configs = [found for root in models.roots if (found := _config(root)) is not None]
    name = type(optimizer).__name__.lower()
    return {"tensors": tensors, "config": configs[0] if len(configs) == 1 else None, "optimizer": name}


def _tensors(root: nn.Module) -> dict[str, Any]:
    if fsdp1_wrappers(root):
        width = next((param.element_size() for param in root.parameters()), 4)
        return {name: [list(shape), width] for name, shape in full_shapes(root).items()}
    return {name: [list(param.shape), param.element_size()] for name, param in named_parameters(root)}


def _config(root: nn.Module) -> dict[str, Any] | None:
    """Return the configuration that transformers' models have."""
    config = getattr(root, "config", None)
    made = config.to_dict() if config is not None and hasattr(config, "to_dict") else None
    return made if isinstance(made, dict) and isinstance(made.get("model_type"), str) else None


class StepClock:
    """The moments at which steps ended: on a GPU, moments of its stream.

    Attributes:
        on_gpu: Whether the GPU's own clock counts.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note that a step has ended; on a GPU nothing waits for it."""
        if not self.on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between one end of a step and the next; on a GPU, after waiting for the last."""
        if self.on_gpu and self._marks:
            self._marks[-1].synchronize()
        return [self._between(*pair) for pair in pairwise(self._marks)]

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after) / 1000 if self.on_gpu else after - before)


_measurements: list["Measurement"] = []


def measure(steps: int, config: Config) -> None:
    """Measure the script that is about to run, and end it after so many optimizer steps.

    Args:
        steps: Of the optimizer that steps most; at least 2.
        config: The worker's.
    """
    install_guard()
    on_gpu = torch.cuda.is_available() and not config.use_cpu
    compiles = config.dynamo_config.dynamo_backend != "NO"
    measurement = Measurement(on_gpu=on_gpu, waits=not on_gpu and not compiles)
    measurement.install()
    _measurements.append(measurement)
    stop_after(steps, _finish_at_step)


def finish() -> None:
    """Write down a script that ended before its steps were made."""
    while _measurements:
        _measurements.pop().write()


def _finish_at_step(_optimizer: Optimizer) -> dict[str, Any]:
    finish()
    return {}


class Measurement:
    """One worker's.

    Args:
        on_gpu: Whether it computes on a GPU.
        waits: Whether to measure the time in collectives.
    """

    def __init__(self, *, on_gpu: bool, waits: bool) -> None:
        self._on_gpu = on_gpu
        self._clocks: dict[int, StepClock] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._totals: dict[int, list[tuple[int, int, float]]] = {}
        self._batches = BatchCount()
        self._waits = CollectiveWait() if waits else None
        self._start = _status("VmRSS") if not on_gpu else 0

    def install(self) -> None:
        """Begin to measure, until the process ends."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._batches.install()
        if self._waits is not None:
            self._waits.install()
        register_optimizer_step_post_hook(self._mark)

    def _mark(self, optimizer: Optimizer, *_: Any) -> None:
        key = id(optimizer)
        self._optimizers.setdefault(key, optimizer)
        self._clocks.setdefault(key, StepClock(on_gpu=self._on_gpu)).mark()
        waited = self._waits.seconds if self._waits is not None else 0.0
        self._totals.setdefault(key, []).append((self._batches.rows, self._batches.tokens, waited))

    def write(self) -> None:
        """Write what was measured into this rank's folder; nothing where no step was made."""
        folder = own_folder()
        if folder is None or not self._clocks:
            return
        most = max(self._totals, key=lambda key: len(self._totals[key]))
        write_json(folder / MEASURED, {**self._steps(most), **self._memory(), "model": self._model(most)})

    def _steps(self, key: int) -> dict[str, Any]:
        """Return the seconds of each step after the first, and the rows, tokens and seconds of waiting in it."""
        totals = self._totals[key]
        rows, tokens, waits = (
            [after[place] - before[place] for before, after in pairwise(totals)] for place in range(3)
        )
        found: dict[str, Any] = {"steps": len(totals), "seconds": self._clocks[key].seconds(), "rows": rows}
        return {**found, "tokens": tokens, "waits": waits if self._waits is not None else None}

    def _memory(self) -> dict[str, Any]:
        """Return the peak in bytes, and what the process took before the script began."""
        if self._on_gpu:
            reserved = torch.cuda.max_memory_reserved()
            return {"memory": torch.cuda.max_memory_allocated(), "reserved": reserved, "start": 0}
        return {"memory": _status("VmHWM"), "reserved": None, "start": self._start}

    def _model(self, key: int) -> dict[str, Any]:
        return {**model_facts(self._optimizers[key]), "batch": self._batches.shape}


def _status(name: str) -> int:
    """Return a number of this process's from the kernel, in bytes; 0 where it says none."""
    return read_size(PROCESS, name) or 0
