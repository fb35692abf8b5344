"""Features beside the road: core imports each by name, from its own folder, when it is asked for.

A folder that is deleted takes its feature away and nothing else; who asks for it then gets one error.
"""

from importlib import import_module
from typing import Any

from fsdplaunch.errors import LaunchError

COMPARISON = "fsdplaunch.comparison.command"
COMPARISON_WORKER = "fsdplaunch.comparison.record"
ESTIMATE = "fsdplaunch.estimate.command"
KUBERNETES = "fsdplaunch.launch.schedulers.kubernetes"
TUNE_WORKER = "fsdplaunch.tune.measure"
WARM_CLIENT = "fsdplaunch.warm.client"
WARM_IMPORTS = "fsdplaunch.warm.import_record"
WARM_SERVER = "fsdplaunch.warm.server"
WATCH = "fsdplaunch.watch.command"
XLA = "fsdplaunch.runtime.xla.set_up"
LAYERS = "fsdplaunch.runtime.split.split_layers"
SEQUENCES = "fsdplaunch.runtime.split.split_blocks"

FOLDERS = {
    "fsdplaunch.tune": "fsdplaunch tune",
    "fsdplaunch.estimate": "fsdplaunch estimate",
    "fsdplaunch.comparison": "fsdplaunch check --compare",
    "fsdplaunch.watch": "fsdplaunch watch, runs show and runs compare",
    "fsdplaunch.warm": "interpreters that are kept warm (launch.keep_warm_seconds)",
    KUBERNETES: "Kubernetes",
    "fsdplaunch.runtime.xla": "PyTorch/XLA",
    "fsdplaunch.runtime.split": "splitting layers and sequences (tp_size, cp_size)",
}
"""Folders that an installation may be without, and what each is for."""


def feature(module: str) -> Any:
    """Import a module of a feature, or a command that needs one.

    Args:
        module: Its dotted name.

    Raises:
        LaunchError: This installation is without the feature.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if (error := built_without(missing)) is not None:
            raise error from None
        raise


def built_without(missing: ModuleNotFoundError) -> LaunchError | None:
    """Return a failed import of a feature that this installation is without, as an error of ours."""
    if missing.name not in FOLDERS:
        return None
    msg = f"this installation lacks {FOLDERS[missing.name]}: {missing.name} is missing"
    return LaunchError(msg, hint="install the complete package")
