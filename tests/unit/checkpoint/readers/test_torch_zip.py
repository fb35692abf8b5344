"""One stored item: reading its zip and its description, and refusing what does not hold together."""

import struct
import zipfile

import pytest

from fsdplaunch.checkpoint.readers.torch_zip import ReadWindow, TorchZipItem, parse_item
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError

DATA = bytes(range(48))


def read(raw: bytes) -> TorchZipItem:
    return parse_item(ReadWindow(lambda offset, count: raw[offset : offset + count], len(raw)))[0]


def sound(dcp, **kind) -> bytes:
    return dcp.zipped(dcp.described("float32", (3, 4)), DATA, **kind)


def assert_holds(raw: bytes, item: TorchZipItem, data: bytes = DATA) -> None:
    assert raw[item.data_offset : item.data_offset + item.data_length] == data


def test_item_larger_than_the_window_is_read_in_few_pieces(dcp):
    data = dcp.pattern(400_000)
    raw = dcp.zipped(dcp.described("float32", (1000, 100)), data)
    calls = []

    def read_counted(offset, count):
        calls.append(count)
        return raw[offset : offset + count]

    assert_holds(raw, parse_item(ReadWindow(read_counted, len(raw)))[0], data)
    assert len(calls) == 2
    assert sum(calls) < 10_000


def test_item_of_another_zip_writer_without_zip64_is_read(dcp, tmp_path):
    path = tmp_path / "item"
    with zipfile.ZipFile(path, "w") as writer:
        writer.writestr("anything/data.pkl", dcp.dumps(dcp.described("float32", (3, 4), key="7"), 2))
        writer.writestr("anything/data/7", DATA)
    raw = path.read_bytes()
    item = read(raw)
    assert_holds(raw, item)
    assert item.crc == zipfile.ZipFile(path).getinfo("anything/data/7").CRC


def test_item_sizes_from_a_zip64_field_are_used(dcp):
    raw = sound(dcp)
    place = raw.rindex(b"archive/data/0") - 46
    fields = list(struct.unpack_from("<4s6H3I5H2I", raw, place))
    wide = struct.pack("<2H3Q", 1, 24, len(DATA), len(DATA), fields[16])
    fields[8] = fields[9] = fields[16] = 0xFFFFFFFF
    fields[11] = len(wide)
    name_end = place + 46 + len(b"archive/data/0")
    raw = raw[:place] + struct.pack("<4s6H3I5H2I", *fields) + raw[place + 46 : name_end] + wide + raw[name_end:]
    raw = grown_directory(raw, len(wide))
    assert_holds(raw, read(raw))


def grown_directory(raw: bytes, by: int) -> bytes:
    """Correct the records at the end after the table of contents grew."""
    end = bytearray(raw[-98:])
    size = struct.unpack_from("<Q", end, 40)[0] + by
    struct.pack_into("<Q", end, 40, size)
    end64 = struct.unpack_from("<Q", end, 56 + 8)[0] + by
    struct.pack_into("<Q", end, 56 + 8, end64)
    return raw[:-98] + bytes(end)


def test_item_without_checksums_or_without_elements_is_read(dcp):
    assert read(sound(dcp, crc=False)).crc is None
    assert read(dcp.zipped(dcp.described("float32", (0, 4)), b"")).data_length == 0


def wrapped(dcp, cls, state, *, dtype="float32", shape=(3, 4), function="_rebuild_wrapper_subclass"):
    shell = (cls, dcp.Named("torch", dtype), shape, (4, 1), 0, dcp.Named("torch", "float32"), None, False)
    outer = dcp.Named("torch._tensor", "_rebuild_from_type_v2")
    return dcp.Called(outer, (dcp.Named("torch._utils", function), cls, shell, state))


def test_float8_wrapper_gives_its_inner_tensor(dcp):
    cls = dcp.Named("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor")
    config = dcp.Made(dcp.Named("torchao.float8.config", "ScaledMMConfig"), {"emulate": False})
    scale = dcp.Called(dcp.Named("torchao.float8.config", "ScalingType"), ("dynamic",))
    state = {
        "_tensor": dcp.described("float32", (3, 4)),
        "config": config,
        "kind": scale,
        "_precomputed_scale": None,
    }
    raw = dcp.zipped(wrapped(dcp, cls, state), DATA)
    assert_holds(raw, read(raw))


def test_plain_subclass_of_tensor_is_its_own_data(dcp):
    inner = dcp.described("float32", (3, 4)).arguments
    function = dcp.Named("torch._utils", "_rebuild_tensor_v2")
    outer = dcp.Named("torch._tensor", "_rebuild_from_type_v2")
    raw = dcp.zipped(dcp.Called(outer, (function, dcp.Named("mylib", "Weight"), inner, {})), DATA)
    assert_holds(raw, read(raw))


@pytest.mark.parametrize(
    ("cls", "state", "match"),
    [
        ("mylib.Quantized", {"_tensor": 0}, "'mylib.Quantized', whose values only its own library can read"),
        ("torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor", {}, "with 0 inner tensors"),
        ("torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor", {"a": 0, "b": 0}, "with 2 inner tensors"),
        ("torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor", None, "with 0 inner tensors"),
    ],
)
def test_wrapper_that_is_not_understood_is_refused(dcp, cls, state, match):
    named = dcp.Named(*cls.rsplit(".", 1))
    state = state and dict.fromkeys(state, dcp.described("float32", (3, 4)))
    with pytest.raises(InvalidFileError, match=match):
        read(dcp.zipped(wrapped(dcp, named, state), DATA))


def spoil(dcp) -> dict[str, bytes]:
    raw = sound(dcp)
    table = raw.index(b"PK\1\2")
    data = raw.rindex(b"archive/data/0") - 46

    def patch(place: int, layout: str, value: object) -> bytes:
        out = bytearray(raw)
        struct.pack_into(layout, out, place, value)
        return bytes(out)

    described, zipped = dcp.described, dcp.zipped
    return {
        "empty": b"",
        "21 bytes": raw[:21],
        "cut at the end": raw[:-1],
        "cut at the start": raw[1:],
        "only the end": raw[-22:],
        "comment": patch(len(raw) - 2, "<H", 5),
        "end64 elsewhere": patch(len(raw) - 42 + 8, "<Q", 3),
        "end64 far away": patch(len(raw) - 42 + 8, "<Q", 2**63),
        "table far away": patch(len(raw) - 98 + 48, "<Q", 2**63),
        "table too long": patch(len(raw) - 98 + 40, "<Q", 2**62),
        "table longer than allowed": patch(len(raw) - 98 + 40, "<Q", 2**20 + 1),
        "more entries announced": patch(len(raw) - 98 + 32, "<Q", 99),
        "other disk": patch(len(raw) - 98 + 16, "<I", 1),
        "entry magic": patch(table, "<I", 0),
        "compressed": patch(data + 10, "<H", 8),
        "encrypted": patch(data + 8, "<H", 0x809),
        "sizes differ": patch(data + 20, "<I", 3),
        "size 4 GiB": patch(data + 24, "<I", 0xFFFFFFFF),
        "size too large": patch_size(raw, data, 4000),
        "header elsewhere": patch(data + 42, "<I", 7),
        "header far away": patch(data + 42, "<I", 0xFFFFFFF0),
        "name too long": patch(data + 28, "<H", 60_000),
        "extra too long": patch(data + 30, "<H", 60_000),
        "name not text": raw.replace(b"archive/version", b"archive/versi\xff\xff"),
        "same name twice": sound(dcp, extra=(("data/0", DATA),)),
        "local name differs": raw.replace(b"archive/data/0", b"archive/data/1", 1),
        "no description": raw.replace(b"data.pkl", b"dada.pkl"),
        "no data": raw.replace(b"archive/data/0", b"archive/dada/0"),
        "description damaged": raw.replace(b"FloatStorage", b"FloatStoragf"),
        "description altered": raw.replace(b"\x03\x00\x00\x00cpu", b"\x03\x00\x00\x00cpv"),
        "big endian": sound(dcp, byteorder=b"big"),
        "byte order unknown": sound(dcp, byteorder=b"\xff\xfe"),
        "data too short": zipped(described("float32", (3, 4)), DATA[:-1]),
        "strides reach outside": zipped(described("float32", (3, 4), (4, 2)), DATA),
        "huge stride": zipped(described("float32", (3, 4), (2**62, 1)), DATA),
        "negative stride": zipped(described("float32", (3, 4), (-4, 1)), DATA),
        "negative start": zipped(described("float32", (3, 4), start=-1), DATA),
        "start outside": zipped(described("float32", (3, 4), start=1), DATA),
        "strides missing": zipped(described("float32", (3, 4), (4,)), DATA),
        "unknown flag": zipped(described("float32", (3, 4), flags={"zero": True}), DATA),
        "flag not a truth value": zipped(described("float32", (3, 4), flags={"conj": 1}), DATA),
        "unknown dtype": zipped(described("float99", (3, 4)), DATA),
        "storage of another kind": zipped(dcp.PersistentId(("module", 1, "0", "cpu", 12)), DATA),
        "a list": zipped([1, 2], DATA),
        "a storage": zipped(described("float32", (3, 4)).arguments[0], DATA),
        "two tensors": zipped((described("float32", (3, 4)), described("float32", (3, 4))), DATA),
        "too few values": zipped(dcp.Called(dcp.Named("torch._utils", "_rebuild_tensor_v2"), ()), DATA),
        "parameter of nothing": zipped(
            dcp.Called(dcp.Named("torch._utils", "_rebuild_parameter"), (None, True, None)), DATA
        ),
        "description too large": zipped(b"\x80\x02" + b"N" * 2_000_000 + b".", DATA),
        "escaping key": zipped(described("float32", (3, 4), key="../../x"), DATA),
    }


def patch_size(raw: bytes, entry: int, size: int) -> bytes:
    out = bytearray(raw)
    struct.pack_into("<2I", out, entry + 20, size, size)
    return bytes(out)


def test_spoilt_items_are_refused(dcp):
    for kind, raw in spoil(dcp).items():
        try:
            item = read(raw)
        except InvalidFileError:
            continue
        pytest.fail(f"{kind}: {item}")
