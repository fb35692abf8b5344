"""`fsdplaunch tune` inside a worker: time a script's optimizer steps, write down what they took, and end it."""

import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
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
"""Dimensions of a batch of token ids: rows, and tokens in each."""
_measurements: list["Measurement"] = []


def measure(steps: int, config: Config) -> None:
    """Measure the script that is about to run, and end it after so many optimizer steps.

    Args:
        steps: Of the optimizer that steps most; at least 2.
        config: The worker's.
    """
    install_guard()
    measurement = Measurement(on_gpu=torch.cuda.is_available() and not config.use_cpu)
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
    """The steps of one worker, by optimizer: when each ended, on a GPU by events in its stream.

    Args:
        on_gpu: Whether it computes on a GPU.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks: dict[int, list[Any]] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._batch: tuple[int, int] | None = None
        self._start = 0 if on_gpu else _own_memory("VmRSS")

    def install(self) -> None:
        """Begin to measure, until the process ends."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        watch_batches(self.note_batch)
        register_optimizer_step_post_hook(self.mark)

    def note_batch(self, batch: Any) -> None:
        """Note rows and tokens per row of a batch of token ids; other batches are ignored."""
        tensor = first_tensor(batch)
        if tensor is not None and tensor.dim() == _SEQUENCES and not tensor.is_floating_point():
            self._batch = (tensor.shape[0], tensor.shape[1])

    def mark(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that a step has ended; on a GPU nothing waits for it."""
        moment: Any = time.perf_counter()
        if self._on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._optimizers.setdefault(id(optimizer), optimizer)
        self._marks.setdefault(id(optimizer), []).append(moment)

    def write(self) -> None:
        """Write what was measured into this rank's folder; nothing where no step was made."""
        folder = own_folder()
        if folder is None or not self._marks:
            return
        key, marks = max(self._marks.items(), key=lambda item: len(item[1]))
        model = {**model_facts(self._optimizers[key]), "batch": self._batch}
        memory = torch.cuda.max_memory_allocated() if self._on_gpu else _own_memory("VmHWM")
        facts = {"steps": len(marks), "seconds": self._seconds(marks), "memory": memory, "start": self._start}
        write_json(folder / MEASURED, {**facts, "model": model})

    def _seconds(self, marks: list[Any]) -> list[float]:
        """Return the seconds between one end of a step and the next."""
        if not self._on_gpu:
            return [after - before for before, after in pairwise(marks)]
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


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


def model_facts(optimizer: Optimizer) -> dict[str, Any]:
    """Return what `estimate` needs of the model that an optimizer trains, as plain data.

    Returns:
        `tensors`: full shape and bytes per element by name; `config`: the `config.json`, None for models that are
        not transformers'; `optimizer`: the class's name in lower case.
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
    config = getattr(root, "config", None)
    made = config.to_dict() if config is not None and hasattr(config, "to_dict") else None
    return made if isinstance(made, dict) and isinstance(made.get("model_type"), str) else None


def _own_memory(name: str) -> int:
    """Return a size of this process in bytes as the kernel says it; 0 where it does not."""
    return read_size(PROCESS, name) or 0
