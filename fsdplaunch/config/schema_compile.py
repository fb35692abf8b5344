"""Keys of accelerate for float8 and torch.compile: `fp8_config` and `dynamo_config`. Part of the one schema.

The environment names are those accelerate's readers look up, which for three keys of `fp8_config` are not the
names its launcher exports.
"""

from dataclasses import dataclass
from typing import Any

from fsdplaunch.config import values as v
from fsdplaunch.config.declare import key

_FP8 = "float8 is not supported yet"
_COMPILE = "compiling from the configuration is not supported yet; call torch.compile in the script"


def _fp8_key(kind: v.Kind, default: Any, text: str, **remarks: Any) -> Any:
    return key(kind, default, text, pending=_FP8, **remarks)


def _dynamo_key(kind: v.Kind, default: Any, text: str, **remarks: Any) -> Any:
    return key(kind, default, text, pending=_COMPILE, **remarks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """How float8 computes. Has a meaning only under mixed_precision: fp8."""

    backend: v.Fp8BackendName | None = _fp8_key(
        v.FP8_BACKEND,
        None,
        "Which library computes: AO (torchao), TE (TransformerEngine) or MSAMP.",
        env="ACCELERATE_FP8_BACKEND",
    )
    enable_fsdp_float8_all_gather: bool = _fp8_key(
        v.FLAG,
        True,
        "AO: gather parameters in float8, half the traffic of bf16.",
        env="ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
    )
    pad_inner_dim: bool = _fp8_key(
        v.FLAG, True, "AO: pad matrices to multiples of 16.", env="ACCELERATE_FP8_PAD_INNER_DIM"
    )
    use_autocast_during_eval: bool = _fp8_key(
        v.FLAG, False, "TE: compute in float8 in evaluation too.", env="ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL"
    )
    margin: int = _fp8_key(v.WHOLE, 0, "TE: margin of the scaling factor.", env="ACCELERATE_FP8_MARGIN")
    interval: int = _fp8_key(v.COUNT, 1, "TE: steps between new scaling factors.", env="ACCELERATE_FP8_INTERVAL")
    fp8_format: v.Fp8FormatName = _fp8_key(
        v.FP8_FORMAT, "HYBRID", "TE: number format of forward and backward.", env="ACCELERATE_FP8_FORMAT"
    )
    amax_history_length: int = _fp8_key(
        v.COUNT,
        1024,
        "TE: steps whose largest values decide the scaling factor.",
        env="ACCELERATE_FP8_AMAX_HISTORY_LEN",
        aliases=("amax_history_len",),
    )
    amax_compute_algorithm: v.AmaxName = _fp8_key(
        v.AMAX,
        "most_recent",
        "TE: which of those values decides.",
        env="ACCELERATE_FP8_AMAX_COMPUTE_ALGO",
        aliases=("amax_compute_algo",),
    )
    override_linear_precision: tuple[bool, bool, bool] = _fp8_key(
        v.THREE_FLAGS,
        (False, False, False),
        "TE: compute forward, data gradient, weight gradient in higher precision.",
    )
    use_mxfp8_block_scaling: bool = _fp8_key(
        v.FLAG, False, "TE: one scale per block of 32 values.", env="ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"
    )
    optimization_level: v.OptLevelName = _fp8_key(
        v.OPT_LEVEL, "O2", "MSAMP: what is kept in float8.", env="ACCELERATE_FP8_OPT_LEVEL", aliases=("opt_level",)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoConfig:
    """Compiling the model with torch.compile. Every key may be written without its `dynamo_` prefix."""

    dynamo_backend: v.DynamoName = _dynamo_key(
        v.DYNAMO,
        "NO",
        "Backend of torch.compile; NO does not compile.",
        env="ACCELERATE_DYNAMO_BACKEND",
    )
    dynamo_mode: v.DynamoModeName = _dynamo_key(
        v.DYNAMO_MODE, "default", "Mode of torch.compile.", env="ACCELERATE_DYNAMO_MODE"
    )
    dynamo_use_fullgraph: bool = _dynamo_key(
        v.FLAG, False, "Fail where the graph would break.", env="ACCELERATE_DYNAMO_USE_FULLGRAPH"
    )
    dynamo_use_dynamic: bool = _dynamo_key(
        v.FLAG, False, "Compile for shapes that change.", env="ACCELERATE_DYNAMO_USE_DYNAMIC"
    )
    dynamo_use_regional_compilation: bool = _dynamo_key(
        v.FLAG,
        False,
        "Compile the repeated block once instead of the whole model.",
        env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    )
