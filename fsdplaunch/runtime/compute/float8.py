"""Linear layers that compute in float8, through torchao, which is installed as an extra."""

from typing import Any

from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.sharding.ignored import IgnoredParts
from fsdplaunch.runtime.sharding.settings import Float8, Settings

_MULTIPLE = 16
"""What float8 matrix products need both sides of a matrix to be a multiple of."""


def convert(model: nn.Module, settings: Settings, out: IgnoredParts) -> int:
    """Exchange a model's linear layers for float8 ones with the same parameters, in place; count them.

    The first and the last linear layer stay, where float8 costs accuracy, and with them layers that cannot be
    padded or are not sharded. Everything else computes in the configured dtype.

    Raises:
        ShardingError: Under FSDP1, without torchao, or when no layer can compute in float8.
    """
    if settings.float8 is None:
        return 0
    if settings.version == 1:
        msg = "mixed_precision fp8 needs fsdp_version 2"
        raise ShardingError(msg, hint="set fsdp_version: 2, or mixed_precision: bf16")
    config, swap = _torchao(settings.float8)
    ignored = out.below()
    linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m not in ignored}
    ends = set(list(linear)[:1] + list(linear)[-1:])
    chosen = {name for name, m in linear.items() if name not in ends and (settings.float8.pad or _fits(m))}
    done = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    if not chosen and not done:
        msg = f"mixed_precision fp8: no linear layer of {type(model).__name__} can compute in float8"
        raise ShardingError(msg, hint="use mixed_precision: bf16")
    swap(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    return len(chosen) + done


def _torchao(how: Float8) -> tuple[Any, Any]:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        msg = f"mixed_precision fp8 needs torchao, which cannot be imported: {error}"
        raise ShardingError(msg, hint="pip install torchao, or set mixed_precision: bf16") from None
    return (
        Float8LinearConfig(enable_fsdp_float8_all_gather=how.gather, pad_inner_dim=how.pad),
        convert_to_float8_training,
    )


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0
