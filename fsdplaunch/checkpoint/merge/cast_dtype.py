"""Change the dtype of floating-point weights, rounding to the nearest as torch does, without torch.

Integers, booleans, complex numbers and 8-bit floats stay what they are: an 8-bit float means nothing without the
scale it was quantized with.
"""

from typing import TYPE_CHECKING, Any

from fsdplaunch.checkpoint.dtypes import DTYPES, Dtype
from fsdplaunch.checkpoint.invalid_file import short
from fsdplaunch.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import numpy as np

TARGETS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_CONVERTIBLE = {"float64", "float32", "float16", "bfloat16"}
_PLAIN = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_QUIET = 0x40


def check_target(name: str | None) -> None:
    """Refuse a `dtype` that is none of `TARGETS`.

    Raises:
        UsageError: With the names that there are.
    """
    if name is not None and name not in TARGETS:
        msg = f"dtype {name!r} is not known"
        raise UsageError(msg, hint=f"use {', '.join(TARGETS)}")


def written_dtype(stored: Dtype, target: str | None) -> Dtype:
    """Return the dtype in which a weight is written when `target` is set."""
    if target is None or stored.name not in _CONVERTIBLE:
        return stored
    return DTYPES[TARGETS[target]]


def convert(data: bytes | bytearray, stored: Dtype, written: Dtype, *, name: str) -> bytes | bytearray:
    """Return little-endian elements of `stored` as elements of `written`, rounded to nearest, ties to even.

    Args:
        data: Whole elements.
        stored: Their type.
        written: The type that is wanted.
        name: The weight, for the message.

    Raises:
        CheckpointError: When a finite value is too large for `written`.
    """
    if stored is written:
        return data
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        wide = _widen(data, stored)
        bits: np.ndarray[Any, Any] = _to_bfloat16(wide) if written.name == "bfloat16" else _to_plain(wide, written)
        infinite = (bits & 0x7FFF) == 0x7F80 if written.name == "bfloat16" else np.isinf(bits)  # noqa: PLR2004
    source = wide if stored.name != "float64" else np.frombuffer(data, "<f8")
    if infinite.any() and bool(np.isfinite(source[infinite]).any()):
        msg = f"{short(name)} holds a value that {written.name} cannot hold: it would become infinite"
        raise CheckpointError(msg, hint="use fp32, or bf16, whose range is that of fp32")
    return bits.tobytes()


def _widen(data: bytes | bytearray, stored: Dtype) -> "np.ndarray[Any, Any]":
    """Return the elements as float32, as torch's own casts do on their way."""
    import numpy as np

    if stored.name == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, _PLAIN[stored.name]).astype("<f4", copy=False)


def _to_plain(wide: "np.ndarray[Any, Any]", written: Dtype) -> "np.ndarray[Any, Any]":
    return wide.astype(_PLAIN[written.name], copy=False)


def _to_bfloat16(wide: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return the upper halves of float32, rounded; NaN stays a quiet NaN instead of becoming infinite."""
    import numpy as np

    bits = wide.view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    broken = (bits & _MAGNITUDE) > _INFINITY
    if broken.any():
        rounded[broken] = ((bits[broken] >> 16) | _QUIET).astype("<u2")
    return np.ascontiguousarray(rounded)
