"""Let Lightning shard on a CPU as it does on GPUs.

`FSDPStrategy` runs there, but the connectors that choose Lightning's parts refuse it for any accelerator but
CUDA's.
"""

import functools
from typing import Any

from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.patch import own_attribute

_CONNECTORS = (
    *(
        (f"{package}.trainer.connectors.accelerator_connector", "_AcceleratorConnector")
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
    *((f"{package}.connector", "_Connector") for package in ("lightning.fabric", "lightning_fabric")),
)
"""Module and class of what checks a strategy, the Trainer's and Fabric's, under both names of the package."""
_CHECK = "_check_strategy_and_fallback"


def adapt_lightning_to_cpu() -> None:
    """Have Lightning take its FSDP strategies on a CPU, if and when the script imports it.

    For workers whose device is the CPU, before the script runs.
    """
    for module, name in _CONNECTORS:
        once_imported(module, functools.partial(_adapt, name=name))


def _adapt(module: Any, *, name: str) -> None:
    connector = getattr(module, name)
    check = getattr(connector, _CHECK)

    @functools.wraps(check)
    def check_as_on_gpu(self: Any) -> None:
        with own_attribute(self, "_accelerator_flag", "cuda"):  # looked at for this alone
            check(self)

    setattr(connector, _CHECK, check_as_on_gpu)
