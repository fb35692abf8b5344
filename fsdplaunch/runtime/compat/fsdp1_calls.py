"""Have FSDP1's calls work with a model that FSDP2 shards.

Scripts written for FSDP1 gather by `with FSDP.state_dict_type(model, ...)` and `FSDP.summon_full_params(model)`.
Of a model that a Trainer or a plain loop has had sharded by FSDP2 these do nothing, and the first ends with
`KeyError: None` when its block is left.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from fsdplaunch.runtime.inspection.units import is_unit


def answer_fsdp1_calls() -> None:
    """Replace both on torch's class for models that only FSDP2 shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

    if not hasattr(Wrapper, "fsdplaunch_answers"):
        Wrapper.fsdplaunch_answers = True  # type: ignore[attr-defined]
        Wrapper.state_dict_type = _either(Wrapper.state_dict_type, _typed)  # type: ignore[method-assign]
        Wrapper.summon_full_params = _either(Wrapper.summon_full_params, _summoned)  # type: ignore[method-assign]


def _either(wrappers: Any, units: Any) -> Any:
    """Return torch's function for FSDP1's models and all others, and ours for those of FSDP2."""

    @functools.wraps(wrappers)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        function = units if _only_units(module) else wrappers
        context: AbstractContextManager[None] = function(module, *args, **kwargs)
        return context

    return staticmethod(call)


def _only_units(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    parts = list(module.modules())
    return any(map(is_unit, parts)) and not any(isinstance(part, FullyShardedDataParallel) for part in parts)


@contextmanager
def _typed(
    module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> Iterator[None]:
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType

    from fsdplaunch.runtime.state_dict.state_dict_type import state_dict_type as ours

    if state_dict_config is None and state_dict_type is StateDictType.FULL_STATE_DICT:
        state_dict_config = FullStateDictConfig()  # torch's own: on every rank
    with ours(module, state_dict_type, state_dict_config, optim_state_dict_config):
        yield


@contextmanager
def _summoned(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
    from fsdplaunch.runtime.api.summon_full_params import summon_full_params as ours

    with ours(module, *args, **kwargs):
        yield
