"""Features beside the road: core imports each by name, from its own folder, when it is asked for."""

from importlib import import_module
from typing import Any

from fsdplaunch.errors import LaunchError

ESTIMATE_MEMORY = "fsdplaunch.estimate.memory"
KUBERNETES = "fsdplaunch.launch.schedulers.kubernetes"
MEASURE = "fsdplaunch.tune.measure"
RECORD = "fsdplaunch.comparison.record"
SEQUENCES = "fsdplaunch.runtime.context_parallel.split_blocks"
TENSOR_FORWARD = "fsdplaunch.runtime.tensor_parallel.split_forward"
TENSOR_PLAN = "fsdplaunch.runtime.tensor_parallel.plan"
TENSOR_SCALING = "fsdplaunch.runtime.tensor_parallel.split_forward"
WARM_CLIENT = "fsdplaunch.warm.client"
WARM_IMPORTS = "fsdplaunch.warm.import_record"
WARM_SERVER = "fsdplaunch.warm.server"
XLA = "fsdplaunch.runtime.xla.set_up"
XLA_ENTRY = "fsdplaunch.runtime.xla.set_up"
XLA_PREPARE = "fsdplaunch.runtime.xla.prepare"

_FOLDERS = {
    "fsdplaunch.tune": "fsdplaunch tune",
    "fsdplaunch.estimate": "fsdplaunch estimate",
    "fsdplaunch.comparison": "fsdplaunch check --compare",
    "fsdplaunch.warm": "interpreters that are kept warm (launch.keep_warm_seconds)",
    KUBERNETES: "Kubernetes",
    "fsdplaunch.runtime.xla": "PyTorch/XLA",
    "fsdplaunch.runtime.tensor_parallel": "splitting layers (tp_size)",
    "fsdplaunch.runtime.context_parallel": "splitting sequences (cp_size)",
}
"""Folders that a package may be built without, and what each is for."""


def feature(module: str) -> Any:
    """Import a module of a feature.

    Args:
        module: Its dotted name.

    Raises:
        LaunchError: This installation has been built without the feature.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name not in _FOLDERS:
            raise
        msg = f"this fsdplaunch was built without {_FOLDERS[missing.name]}: there is no {missing.name}"
        raise LaunchError(msg, hint="install the complete package") from None
