"""`fsdplaunch tune` inside a worker: time a script's optimizer steps, write down what they took, and end it."""

import time
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from fsdplaunch.config.schema.config import Config
from fsdplaunch.files import PROCESS, read_size
from fsdplaunch.run_dir import MEASURED, write_json
from fsdplaunch.runtime.check_run import stop_after
from fsdplaunch.runtime.rank import own_folder
from fsdplaunch.tune.write_guard import install_guard

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
        self._marks: dict[Optimizer, list[Any]] = {}

    def install(self) -> None:
        """Begin to measure, until the process ends."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self.mark)

    def mark(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that a step has ended; on a GPU nothing waits for it."""
        moment: Any = time.perf_counter()
        if self._on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._marks.setdefault(optimizer, []).append(moment)

    def write(self) -> None:
        """Write what was measured into this rank's folder; nothing where no step was made."""
        folder = own_folder()
        if folder is None or not self._marks:
            return
        marks = max(self._marks.values(), key=len)
        memory = torch.cuda.max_memory_allocated() if self._on_gpu else read_size(PROCESS, "VmHWM") or 0
        write_json(folder / MEASURED, {"steps": len(marks), "seconds": self._seconds(marks), "memory": memory})

    def _seconds(self, marks: list[Any]) -> list[float]:
        """Return the seconds between one end of a step and the next."""
        if not self._on_gpu:
            return [after - before for before, after in pairwise(marks)]
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
