"""Which dtypes a checkpoint may hold, and what safetensors calls them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dtype:
    """One dtype.

    Attributes:
        name: What torch calls it, for example `bfloat16`.
        code: What safetensors calls it, or None when safetensors cannot hold it.
        size: Bytes per element, 0 where elements are smaller than a byte and cannot be copied by element.
        rank: Its place in safetensors' own order; a file's tensors stand in descending rank.
        lanes: Values that safetensors counts per element (two for packed 4-bit floats).
    """

    name: str
    code: str | None
    size: int
    rank: int = -1
    lanes: int = 1


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
