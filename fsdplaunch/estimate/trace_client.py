"""Ask a process that has torch to shard the model and trace one step of it. Never imports torch itself."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdplaunch.config.environment import encode
from fsdplaunch.config.resolve import mesh_sizes
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.estimate.model import ModelSizes, TensorSize, model_sizes
from fsdplaunch.parent_death import ended_with_us
from fsdplaunch.private_dir import make_process_dir

_HOST_PARTS = ("parameters", "gradients", "optimizer")
_MARK = "fsdplaunch: "


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What one traced step needed.

    Attributes:
        parts: Bytes on the GPU at the peak, by what they are for.
        host: Bytes per rank that lie in host memory instead, under fsdp_offload_params.
        phase: forward, backward or step: when the peak was.
        module: The module that computed then; empty outside of the model.
        sizes: The model that was built.
        messages: What sharding reported.
        seconds: How long it took.
    """

    parts: Mapping[str, int]
    host: int
    phase: str
    module: str
    sizes: ModelSizes
    messages: tuple[str, ...]
    seconds: float

    @property
    def total(self) -> int:
        """Return bytes on the GPU at the peak."""
        return sum(self.parts.values())


def trace_step(
    config: Config,
    *,
    source: str,
    function: str,
    world: int,
    per_node: int,
    batch_size: int,
    length: int,
    optimizer: str,
) -> StepTrace:
    """Trace one training step of rank 0 of `world` ranks.

    Args:
        config: Resolved.
        source: Path of a `config.json`, or of a script.
        function: Name of the script's function that builds the model; empty for a `config.json`.
        world: Ranks over all nodes.
        per_node: Ranks on each node.
        batch_size: Sequences per rank and step.
        length: Tokens of each.
        optimizer: Its name.

    Raises:
        LaunchError: The model cannot be built, sharded or traced.
    """
    if config.fsdp_config.fsdp_version == 1:
        msg = "the exact estimate covers FSDP2 only: torch's memory tracker does not know FSDP1"
        raise UsageError(msg, hint="leave --exact out, or set fsdp_version to 2")
    sizes = mesh_sizes(config, world)
    if sizes.tensor * sizes.context > 1:
        msg = "the exact estimate follows neither split layers nor split sequences"
        raise UsageError(msg, hint="leave --exact out, or set tp_size and cp_size to 1")
    request = {
        "source": source, "function": function, "world": world, "per_node": per_node, "batch_size": batch_size,
        "length": length, "optimizer": optimizer,
    }  # fmt: skip
    answer, errors = _ask(request, config)
    tensors = {name: TensorSize(tuple(shape), width) for name, (shape, width) in answer["tensors"].items()}
    where = f"{source}:{function}" if function else source
    model = model_sizes(tensors, where, prefixes=tuple(answer["units"]))
    parts, host = dict(answer["parts"]), 0
    if config.fsdp_config.fsdp_offload_params:
        host = sum(parts.pop(name) for name in _HOST_PARTS)
        parts |= dict.fromkeys(_HOST_PARTS, 0)
    return StepTrace(
        parts=parts,
        host=host,
        phase=answer["peak"]["phase"],
        module=answer["peak"]["module"],
        sizes=model,
        messages=tuple(line.removeprefix(_MARK) for line in errors if line.startswith(_MARK)),
        seconds=answer["seconds"],
    )


def _ask(request: Mapping[str, Any], config: Config) -> tuple[dict[str, Any], list[str]]:
    """Run the tracing process; return its answer and the lines it wrote."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP", "ACCELERATE_"))}
    environ |= encode(config) | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = make_process_dir()
    request_file, answer_file = folder / "request.json", folder / "answer.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-m", "fsdplaunch.estimate.trace_step", str(request_file), str(answer_file)]
    done = subprocess.run(
        command,
        env=environ,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=ended_with_us(),
    )
    lines = done.stderr.splitlines()
    if not answer_file.is_file():
        raise _died(done.returncode, lines)
    answer = json.loads(answer_file.read_text(encoding="utf-8"))
    if "error" in answer:
        raise UsageError(answer["error"], hint=answer["hint"])
    return answer, lines


def _died(status: int, lines: list[str]) -> LaunchError:
    last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
    if status < 0:
        msg = f"the tracing process was killed by signal {-status}"
        return LaunchError(msg, hint="most often for want of host memory")
    msg = f"the tracing process failed: {last}"
    return LaunchError(msg, hint="leave --exact out; FSDPLAUNCH_TRACEBACK=1 shows its whole output")
