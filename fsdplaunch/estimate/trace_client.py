"""Ask a process that has torch to shard the model and trace one step of it. Never imports torch itself."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdplaunch.config.environment import encode
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.estimate.memory import TrainingSetup
from fsdplaunch.estimate.model import ModelSizes, TensorSize, model_sizes
from fsdplaunch.parent_death import ended_with_us
from fsdplaunch.private_dir import make_process_dir

_HOST_PARTS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What one traced step needed.

    Attributes:
        parts: Bytes on the GPU at the peak, by what they are for.
        host: Bytes per rank that lie in host memory instead, under fsdp_offload_params.
        sizes: The model that was built.
        seconds: How long it took.
    """

    parts: Mapping[str, int]
    host: int
    sizes: ModelSizes
    seconds: float

    @property
    def total(self) -> int:
        """Return bytes on the GPU at the peak."""
        return sum(self.parts.values())


def trace_step(config: Config, setup: TrainingSetup, *, source: str, function: str) -> StepTrace:
    """Trace one training step of rank 0.

    Args:
        config: Resolved.
        setup: The run.
        source: Path of a `config.json`, or of a script.
        function: Name of the script's function that builds the model; empty for a `config.json`.

    Raises:
        LaunchError: The model cannot be built, sharded or traced.
    """
    if setup.version == 1:
        msg = "the exact estimate covers FSDP2 only: torch's memory tracker does not know FSDP1"
        raise UsageError(msg, hint="leave --exact out, or set fsdp_version to 2")
    if setup.tensor * setup.context > 1:
        msg = "the exact estimate follows neither split layers nor split sequences"
        raise UsageError(msg, hint="leave --exact out, or set tp_size and cp_size to 1")
    request = {"source": source, "function": function}
    request |= {name: getattr(setup, name) for name in ("world", "per_node", "batch_size", "length", "optimizer")}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP", "ACCELERATE_"))}
    environ |= encode(config) | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = make_process_dir()
    request_file, answer_file = folder / "request.json", folder / "answer.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-m", "fsdplaunch.estimate.trace_step", str(request_file), str(answer_file)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, errors="replace", check=False,
        preexec_fn=ended_with_us(),
    )  # fmt: skip
    if not answer_file.is_file():
        if done.returncode < 0:
            msg = f"the tracing process was killed by signal {-done.returncode}"
            raise LaunchError(msg, hint="most often for want of host memory")
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        msg = f"the tracing process failed: {lines[-1] if lines else 'it printed nothing'}"
        raise LaunchError(msg, hint="leave --exact out; FSDPLAUNCH_TRACEBACK=1 shows its whole output")
    answer: dict[str, Any] = json.loads(answer_file.read_text(encoding="utf-8"))
    if "error" in answer:
        raise UsageError(answer["error"], hint=answer["hint"])
    tensors = {name: TensorSize(tuple(shape), width) for name, (shape, width) in answer["tensors"].items()}
    where = f"{source}:{function}" if function else source
    parts, host = dict(answer["parts"]), 0
    if config.fsdp_config.fsdp_offload_params:
        host = sum(parts[name] for name in _HOST_PARTS)
        parts |= dict.fromkeys(_HOST_PARTS, 0)
    sizes = model_sizes(tensors, where, prefixes=tuple(answer["units"]))
    return StepTrace(parts=parts, host=host, sizes=sizes, seconds=answer["seconds"])
