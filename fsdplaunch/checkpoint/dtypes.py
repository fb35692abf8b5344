"""Which dtypes a checkpoint may hold, what safetensors calls them, and how weights change from one to another."""

from dataclasses import dataclass
from typing import Any

from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Dtype:
    """One dtype."""

    name: str  # what torch calls it, for example `bfloat16`
    code: str | None  # what safetensors calls it, or None when safetensors cannot hold it
    size: int  # bytes per element, 0 where elements are smaller than a byte and cannot be copied by element
    rank: int = -1  # its place in safetensors' own order; a file's tensors stand in descending rank
    lanes: int = 1  # values that safetensors counts per element (two for packed 4-bit floats)


# safetensors writes tensors in the reverse of this order, then by name.
_STORABLE = (
    ("bool", "BOOL", 1),
    ("float4_e2m1fn_x2", "F4", 1),
    ("uint8", "U8", 1),
    ("int8", "I8", 1),
    ("float8_e5m2", "F8_E5M2", 1),
    ("float8_e4m3fn", "F8_E4M3", 1),
    ("float8_e8m0fnu", "F8_E8M0", 1),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
    ("int16", "I16", 2),
    ("uint16", "U16", 2),
    ("float16", "F16", 2),
    ("bfloat16", "BF16", 2),
    ("int32", "I32", 4),
    ("uint32", "U32", 4),
    ("float32", "F32", 4),
    ("complex64", "C64", 8),
    ("float64", "F64", 8),
    ("int64", "I64", 8),
    ("uint64", "U64", 8),
)

# Known to torch, unknown to safetensors: named so that the error can name the tensor and its dtype.
_OTHER = {
    "complex128": 16,
    "complex32": 4,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
    "quint4x2": 0,
    "quint2x4": 0,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 0,
    "bits2x4": 0,
    "bits4x2": 0,
    **{f"int{bits}": 0 for bits in range(1, 8)},
    **{f"uint{bits}": 0 for bits in range(1, 8)},
}

DTYPES: dict[str, Dtype] = {
    name: Dtype(name, code, size, rank, 2 if code == "F4" else 1)
    for rank, (name, code, size) in enumerate(_STORABLE)
} | {name: Dtype(name, None, size) for name, size in _OTHER.items()}

# The typed storages that torch.save names in an item's `data.pkl`.
STORAGES: dict[str, Dtype] = {
    "BoolStorage": DTYPES["bool"],
    "ByteStorage": DTYPES["uint8"],
    "CharStorage": DTYPES["int8"],
    "ShortStorage": DTYPES["int16"],
    "IntStorage": DTYPES["int32"],
    "LongStorage": DTYPES["int64"],
    "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"],
    "FloatStorage": DTYPES["float32"],
    "DoubleStorage": DTYPES["float64"],
    "ComplexFloatStorage": DTYPES["complex64"],
    "ComplexDoubleStorage": DTYPES["complex128"],
}


TARGETS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What weights may be converted to, by the word of the option."""
_PLAIN = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
_QUIET = 0x40


def convert(data: bytes | bytearray, stored: Dtype, written: Dtype, *, name: str) -> bytes | bytearray:
    """Return little-endian elements of `stored` as elements of `written`, rounded to nearest, ties to even.

    `data` are whole elements; messages call the weight `name`.

    Raises:
        CheckpointError: When a finite value is too large for `written`.
    """
    if stored is written:
        return data
    import numpy as np

    result: np.ndarray[Any, Any]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # By way of float32, as torch's own casts.
        if stored.name == "bfloat16":
            wide = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            wide = np.frombuffer(data, _PLAIN[stored.name]).astype("<f4", copy=False)
        if written.name == "bfloat16":
            bits, broken = wide.view("<u4"), np.isnan(wide)
            result = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
            if broken.any():  # stays a quiet NaN instead of becoming infinite
                result[broken] = ((bits[broken] >> 16) | _QUIET).astype("<u2")
            infinite = (result & 0x7FFF) == 0x7F80  # noqa: PLR2004
        else:
            result = wide.astype(_PLAIN[written.name], copy=False)
            infinite = np.isinf(result)
    source = wide if stored.name != "float64" else np.frombuffer(data, "<f8")
    if infinite.any() and bool(np.isfinite(source[infinite]).any()):
        msg = f"{short(name)} holds a value that {written.name} cannot hold: it would become infinite"
        raise CheckpointError(msg, hint="use fp32, or bf16, whose range is that of fp32")
    return result.tobytes()
