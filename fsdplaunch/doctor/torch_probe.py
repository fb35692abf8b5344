"""Ask the installed torch about itself, in a process of its own: this one never imports torch."""

import json
import subprocess
import sys

from fsdplaunch.doctor.facts import TorchFacts
from fsdplaunch.parent_death import ended_with_us

TIMEOUT_SECONDS = 120
_CODE = """
import json, sys
import torch
import torch.distributed as dist
there = dist.is_available()
cuda = torch.version.cuda or ""
nccl = ""
if there and dist.is_nccl_available() and cuda:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
sys.stdout.write("\\n" + json.dumps({
    "version": torch.__version__, "cuda": cuda, "nccl": nccl,
    "archs": torch.cuda.get_arch_list() if torch.cuda.is_available() else [],
    "sees_gpus": torch.cuda.device_count() if cuda else 0,
    "has_gloo": there and dist.is_gloo_available(), "has_distributed": there,
}))
"""


def probe_torch(python: str = sys.executable) -> TorchFacts:
    """Start an interpreter that imports torch and says what it has; seconds.

    Args:
        python: The interpreter that workers would run.
    """
    try:
        done = subprocess.run(
            [python, "-c", _CODE],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
            preexec_fn=ended_with_us(),
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"importing it takes longer than {TIMEOUT_SECONDS} s")
    except OSError as error:
        return TorchFacts(error=f"{python} cannot be started: {error.strerror}")
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        return TorchFacts(error=last or f"importing it ended with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    return TorchFacts(**{**found, "archs": tuple(found["archs"])})
