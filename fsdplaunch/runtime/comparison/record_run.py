"""Record a run from its start to its last step, and write it down; the workers compare their parameters as well.

    python -m fsdplaunch.runtime.comparison.record_run [-m] SCRIPT_OR_MODULE [ARGS...]     the plain process

The plain process keeps its final parameters in a file. The workers gather theirs one at a time and look there, and
so does a plain process whose weights were changed in their last digits.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fsdplaunch.config.environment import COMPARE_CHANGED, COMPARE_DIR, REHEARSAL_STEPS
from fsdplaunch.run_dir import COMPARED_CHANGED, COMPARED_PLAIN, write_json
from fsdplaunch.runtime.check_run import stop_after
from fsdplaunch.runtime.comparison.last_digits import LastDigits
from fsdplaunch.runtime.comparison.recorder import Recorder
from fsdplaunch.runtime.compat.accelerate.loaders import shuffle_alike_of_accelerate
from fsdplaunch.runtime.data.random_state import SEED, seed_all
from fsdplaunch.runtime.data.seeding import Seeds, seeding_from
from fsdplaunch.runtime.rank import rank, rank_variable
from fsdplaunch.runtime.script import parse_target, run_target

PARAMETERS = "parameters.safetensors"
_recorders: list[tuple[Recorder, int | None]] = []
"""What records this process, and which worker it is; None for the plain one. The script may set RANK itself."""


def record(steps: int) -> None:
    """Record the script that is about to run, and end it after so many optimizer steps."""
    seed_all(SEED)
    shuffle_alike_of_accelerate()
    recorder = Recorder()
    recorder.install()
    if _is_changed():
        LastDigits().install()
    _recorders.append((recorder, None if rank_variable("RANK") is None else rank()))
    recorder.count = stop_after(steps, _finish_at_step)


def finish() -> None:
    """Write the record of a script that ended before its steps were made."""
    while _recorders:
        _finish(*_recorders.pop())


def _finish_at_step(_stepping: Any) -> dict[str, Any]:
    finish()
    return {}


def _finish(recorder: Recorder, worker: int | None) -> None:
    folder = Path(os.environ[COMPARE_DIR])
    facts = recorder.facts()
    if worker is None and not _is_changed():
        tensors = {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in recorder.models.full_tensors()
        }
        save_file(tensors, folder / PARAMETERS)
    else:
        facts["parameters"] = _compared(recorder, folder / PARAMETERS)
    own = COMPARED_CHANGED if _is_changed() else COMPARED_PLAIN
    write_json(folder / (own if worker is None else f"rank{worker}.json"), facts)


def _is_changed() -> bool:
    """Return whether this is the process whose weights change in their last digits."""
    return os.environ.get(COMPARE_CHANGED) == "1"


def _compared(recorder: Recorder, plain: Path) -> dict[str, Any]:
    """Return for each parameter how far it is from the plain process's, at most; None where that has none."""
    found: dict[str, Any] = {}
    with safe_open(plain, framework="pt") as file:
        names = set(file.keys())
        for name, value in recorder.models.full_tensors():
            found[name] = _distance(value, file.get_tensor(name)) if name in names else None
    return found


def _distance(value: torch.Tensor, plain: torch.Tensor) -> float | None:
    """Return the largest difference, relative to the largest plain value where that is above 1.

    What is infinite or no number in both is equal.
    """
    if value.shape != plain.shape:
        return None
    if not value.numel():
        return 0.0
    one, other = value.double(), plain.double()
    equal = (one == other) | (one.isnan() & other.isnan())
    largest = other.abs().nan_to_num(0.0, posinf=0.0).max().clamp(min=1.0)
    return float(((one - other).abs().masked_fill(equal, 0.0).max() / largest).item())


def main(argv: list[str]) -> None:
    """Run and record the plain process; the workers' own set-up seeds what a script of theirs leaves to chance."""
    with seeding_from(Seeds(SEED)):
        record(int(os.environ[REHEARSAL_STEPS]))
        try:
            run_target(parse_target(argv))
        finally:
            finish()


if __name__ == "__main__":
    # Through the imported module: this one, the interpreter's first `__main__`, is replaced by the script.
    import_module("fsdplaunch.runtime.comparison.record_run").main(sys.argv[1:])
