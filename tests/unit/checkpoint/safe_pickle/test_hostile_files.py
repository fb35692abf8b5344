"""Checkpoints that mean harm or are broken: one clear error each, nothing written, nothing run, little memory."""

import sys
import time
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from fsdplaunch.checkpoint.readers.dcp_index import parse_index
from fsdplaunch.errors import CheckpointError

HUGE = 2**63


def assert_refused(folder: Path, match: str, **options) -> None:
    """The merge fails with one clear error, leaves no output and no other trace."""
    base = folder.parent
    before = sorted(base.iterdir())
    with pytest.raises(CheckpointError, match=match) as caught:
        merge(folder, base / "out", options=MergeOptions(**options))
    assert sorted(base.iterdir()) == before
    assert len(str(caught.value)) < 3000
    assert str(caught.value).isascii()
    assert "\n" not in caught.value.message


# Pickles that ask for code to be run, put where a value is expected. Each would create the file `canary`.
def code_pickles(dcp, canary: Path) -> dict:
    named, called = dcp.Named, dcp.Called
    touch = f"open({str(canary)!r}, 'w').close()"
    return {
        "os.system": called(named("os", "system"), (f"touch {canary}",)),
        "posix.system": called(named("posix", "system"), (f"touch {canary}",)),
        "eval": called(named("builtins", "eval"), (touch,)),
        "exec": called(named("builtins", "exec"), (touch,)),
        "import": called(named("builtins", "__import__"), ("antigravity",)),
        "getattr": called(named("builtins", "getattr"), (named("os", "path"), "os")),
        "dotted": called(named("torch", "serialization.os.system"), (f"touch {canary}",)),
        "runpy": called(named("runpy", "run_path"), ("x.py",)),
        "torch.load": called(named("torch.serialization", "load"), ("x.pt",)),
        "operator": called(named("operator", "attrgetter"), ("system",)),
        "functools": called(named("functools", "partial"), (named("os", "system"), "true")),
        "call a dtype": called(named("torch", "float32"), ()),
        "call a record": called(named(dcp.METADATA, "Metadata"), ()),
        "new Size": dcp.Made(named("torch", "Size")),
        "INST": dcp.Raw(b"(S'touch x'\nios\nsystem\n"),
        "INST unicode": dcp.Raw(b"(X\x01\x00\x00\x00xios\nsystem\n"),
        "OBJ": dcp.Raw(b"(cos\nsystem\nX\x01\x00\x00\x00xo"),
        "NEWOBJ_EX": dcp.Raw(b"csubprocess\nPopen\nX\x01\x00\x00\x00x\x85}\x92"),
        "BUILD on a dict": dcp.Raw(b"}}b"),
        "BUILD on a name": dcp.Raw(b"ctorch\nSize\n}X\x08\x00\x00\x00__init__Nsb"),
        "EXT1": dcp.Raw(b"\x82\x01"),
        "EXT4": dcp.Raw(b"\x84\x01\x00\x00\x00"),
        "PERSID": dcp.Raw(b"Pos.system\n"),
        "BINPERSID": dcp.Raw(b"K\x01\x85Q"),
        "BYTEARRAY8": dcp.Raw(b"\x96" + (2**40).to_bytes(8, "little")),
        "NEXT_BUFFER": dcp.Raw(b"\x97"),
        "LONG4": dcp.Raw(b"\x8b\xff\xff\xff\x7f"),
        "LONG1 wide": dcp.Raw(b"\x8a\xff" + b"\x01" * 255),
        "FLOAT": dcp.Raw(b"F1.5\n"),
        "INT": dcp.Raw(b"I" + b"9" * 5000 + b"\n"),
        "LONG": dcp.Raw(b"L" + b"9" * 5000 + b"L\n"),
        "STRING": dcp.Raw(b"S'x'\n"),
        "UNICODE": dcp.Raw(b"Vx\n"),
        "EMPTY_SET": dcp.Raw(b"\x8f"),
        "FROZENSET": dcp.Raw(b"(\x91"),
        "DUP": dcp.Raw(b"N2"),
        "POP": dcp.Raw(b"NN0"),
        "POP_MARK": dcp.Raw(b"N(1"),
        "GET": dcp.Raw(b"g0\n"),
        "PUT": dcp.Raw(b"Np" + b"9" * 18 + b"\n"),
        "LONG_BINPUT": dcp.Raw(b"Nr\xff\xff\xff\x7f"),
        "LONG_BINGET": dcp.Raw(b"j\xff\xff\xff\x7f"),
        "deep marks": dcp.Raw(b"(" * 5000),
        "deep tuples": dcp.Raw(b"(" * 200 + b"t" * 200),
        "PROTO 0": dcp.Raw(b"\x80\x00N"),
        "STOP early": dcp.Raw(b"."),
        "too long text": dcp.Raw(b"\x8d" + (2**62).to_bytes(8, "little")),
        "not UTF-8": dcp.Raw(b"\x8c\x02\xff\xfe"),
        "surrogate": dcp.Raw(b"\x8c\x03\xed\xa0\x80"),
        "stray MARK end": dcp.Raw(b"t"),
        "APPEND to a tuple": dcp.Raw(b")Na"),
        "SETITEM on a list": dcp.Raw(b"]NNs"),
        "odd SETITEMS": dcp.Raw(b"}(Nu"),
        "list as a key": dcp.Raw(b"}]Ns"),
        "name of a number": dcp.Raw(b"K\x01K\x02\x93"),
        "endless name": dcp.Raw(b"c" + b"a" * 5000 + b"\n" + b"b\n"),
    }


@pytest.mark.parametrize("place", ["planner_data", "version", "storage_meta", "entry", "storage", "whole"])
def test_index_with_a_foreign_pickle_is_refused(dcp, place, tmp_path):
    for number, attack in enumerate(code_pickles(dcp, tmp_path / "canary").values()):
        draft = dcp.Draft().add("w", (4,))
        if place == "entry":
            draft.entries["model.x"] = attack
        elif place == "storage":
            draft.storage.append((dcp.index_key("model.x", (0,)), attack))
        elif place != "whole":
            draft.extra[place] = attack
        folder = draft.save(tmp_path / str(number) / "ckpt")
        if place == "whole":
            (folder / ".metadata").write_bytes(dcp.dumps(attack))
        assert_refused(folder, r"\.metadata (is not a checkpoint that is safe to read|is damaged)")
    assert not (tmp_path / "canary").exists()
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("wrapped", [False, True])
def test_item_with_a_foreign_pickle_is_refused(dcp, wrapped, tmp_path):
    wrapper = dcp.Named("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor")
    shell = (wrapper, dcp.Named("torch", "float32"), (4,), (1,), 0, None, None, False)
    function = dcp.Named("torch._utils", "_rebuild_wrapper_subclass")
    for kind, attack in code_pickles(dcp, tmp_path / "canary").items():
        state = {"_tensor": dcp.described("float32", (4,)), "other": attack}
        whole = dcp.Called(dcp.Named("torch._tensor", "_rebuild_from_type_v2"), (function, wrapper, shell, state))
        raw = dcp.dumps(whole if wrapped else attack, 2)
        draft = dcp.Draft().add("w", (4,), item=lambda part, _, raw=raw: dcp.zipped(raw, part))
        folder = draft.save(tmp_path / kind / "ckpt")
        assert_refused(folder, r"the chunk of 'model.w' at byte 0 cannot be read: ")
    assert not (tmp_path / "canary").exists()


def test_index_larger_than_the_limit_is_refused(tmp_path):
    folder = tmp_path / "ckpt"
    folder.mkdir()
    with (folder / ".metadata").open("wb") as file:
        file.truncate(2**40)
    assert_refused(folder, r"\.metadata is larger than \d+ MiB")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b", "a\nb", "x" * 256, "sub/../../x"]
)
def test_data_file_name_outside_the_folder_is_refused(dcp, name, tmp_path):
    (tmp_path / "x").write_bytes(b"secret" * 1000)
    draft = dcp.Draft().add("w", (4,))
    draft.storage = [(dcp.index_key("model.w", (0,)), dcp.info(name, 0, 100))]
    assert_refused(draft.save(tmp_path / "ckpt"), "is not the name of a file in the checkpoint's folder")


def test_data_file_that_is_a_link_out_of_the_folder_is_refused(dcp, tmp_path):
    folder = dcp.Draft().add("w", (4,)).save(tmp_path / "ckpt")
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert_refused(folder, "is a link that leads out of the checkpoint")


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (HUGE, 100),
        (0, HUGE),
        (2**62, 2**62),
        (-1, 100),
        (0, -1),
        (0, 2**200),
        (-(2**63), 100),
        (True, 100),
        (0.0, 9),
        ("0", 9),
    ],
)
def test_item_place_that_no_file_has_is_refused(dcp, offset, length, tmp_path):
    draft = dcp.Draft().add("w", (4,))
    draft.storage = [(dcp.index_key("model.w", (0,)), dcp.info("__0_0.distcp", offset, length))]
    assert_refused(
        draft.save(tmp_path / "ckpt"),
        r"an item('s (place|length) is| ends beyond)|the index expects|an integer of 26 bytes",
    )


@pytest.mark.parametrize("numbers", [(HUGE,), (-4,), (2**62, 2**62), (4, 2**200), (1,) * 65])
def test_tensor_size_that_cannot_be_is_refused(dcp, numbers, tmp_path):
    draft = dcp.Draft().add("w", (4,))
    draft.entries["model.w"] = dcp.tensor_entry("float32", numbers, [((0,), (4,))])
    assert_refused(
        draft.save(tmp_path / "ckpt"),
        r"a size is|not a short tuple|a chunk has|chunks cover|an integer of 26 bytes",
    )


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ([], "chunks cover 0 of its 24 elements"),
        ([((0, 0), (3, 4))], "chunks cover 12 of its 24 elements"),
        ([((0, 0), (4, 4)), ((3, 0), (3, 4))], "chunks overlap: they hold 28 elements"),
        ([((0, 0), (3, 4)), ((1, 0), (3, 4))], "chunks overlap, and others leave a gap"),
        ([((0, 0), (3, 4)), ((0, 0), (3, 4))], "chunks overlap, and others leave a gap"),
        ([((0, 0), (3, 4)), ((4, 0), (3, 4))], "reaches outside"),
        ([((0, 0), (3, 4)), ((3,), (3,))], "a chunk has 1 dimensions"),
        ([((0, 0), (3, 4)), ((3, 0), (3,))], "a chunk has 1 dimensions and 2 offsets"),
        ([((0, 0), (3, 4)), ((3, 0), (3, 2)), ((3, 1), (3, 2))], "overlap"),
    ],
)
def test_chunks_that_do_not_tile_the_tensor_are_refused(dcp, boxes, match, tmp_path):
    draft = dcp.Draft().add("w", (6, 4), [((0, 0), (3, 4)), ((3, 0), (3, 4))])
    draft.entries["model.w"] = dcp.tensor_entry("float32", (6, 4), boxes)
    assert_refused(draft.save(tmp_path / "ckpt"), match)


def test_two_chunks_at_the_same_bytes_are_refused(dcp, tmp_path):
    draft = dcp.Draft().add("w", (6, 4), [((0, 0), (3, 4)), ((3, 0), (3, 4))])
    draft.storage[1] = (draft.storage[1][0], draft.storage[0][1])
    assert_refused(draft.save(tmp_path / "ckpt"), r"'model.w' and 'model.w' share bytes of __0_0.distcp")


def test_chunk_without_bytes_is_refused(dcp, tmp_path):
    draft = dcp.Draft().add("w", (6, 4), [((0, 0), (3, 4)), ((3, 0), (3, 4))])
    draft.storage.pop()
    assert_refused(draft.save(tmp_path / "ckpt"), r"'model.w' at \[3, 0\] has no bytes in any file")


def test_missing_data_files_are_named(dcp, rows, tmp_path):
    folder = rows.save(tmp_path / "ckpt")
    (folder / "__1_0.distcp").unlink()
    assert_refused(folder, r"lacks 1 of the 2 files its index names: '__1_0.distcp'")


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_data_file_that_is_cut_short_is_refused(dcp, keep, tmp_path):
    folder = dcp.Draft().add("w", (4,)).save(tmp_path / "ckpt")
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(folder, r"__0_0.distcp has \d+ bytes, the index expects \d+")


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "x" * 100_000, "__metadata__", "", "a\x1bb", "a\u202eb"])
def test_tensor_name_that_cannot_be_a_key_is_refused(dcp, name, tmp_path):
    draft = dcp.Draft().add(name, (4,)).add("w", (4,))
    assert_refused(draft.save(tmp_path / "ckpt"), "cannot be the name of a tensor")


def test_header_larger_than_safetensors_reads_is_refused(dcp, tmp_path, monkeypatch):
    monkeypatch.setattr("fsdplaunch.checkpoint.safetensors_format.MAX_HEADER", 1000)
    draft = dcp.Draft()
    for number in range(20):
        draft.add(f"w{number}", (1,))
    assert_refused(
        draft.save(tmp_path / "ckpt"), r"20 tensors need a header of \d+ bytes, safetensors reads at most 1000"
    )


def test_sparse_tensor_is_refused_by_name(dcp, tmp_path):
    draft = dcp.Draft().add("w", (4,))
    state = draft.entries["model.w"].state["properties"].state
    layout = dcp.Called(state[1].callee, ("torch.sparse_coo",))
    draft.entries["model.w"].state["properties"].state = (state[0], layout, *state[2:])
    assert_refused(draft.save(tmp_path / "ckpt"), "'model.w' is a 'sparse_coo' tensor")


def test_path_that_contradicts_the_name_is_refused(dcp, tmp_path):
    draft = dcp.Draft().add("w", (4,))
    draft.planner["model.w"] = ("model", "v")
    assert_refused(draft.save(tmp_path / "ckpt"), "'model.w' has the path 'model.v'")


def test_records_without_their_state_are_refused(dcp, tmp_path):
    names = ["Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"]
    for number, name in enumerate(names):
        draft = dcp.Draft().add("w", (4,))
        draft.entries["model.w"] = dcp.Made(dcp.Named(dcp.METADATA, name))
        assert_refused(draft.save(tmp_path / f"ckpt{number}"), "'model.w' (is a|of shape|has no)")


def test_index_of_many_chunks_is_checked_in_reasonable_time(dcp):
    count = 3000
    boxes = [((row, 0), (1, 8)) for row in range(count)]
    draft = dcp.Draft()
    draft.entries["w"] = dcp.tensor_entry("float32", (count, 8), boxes)
    draft.storage = [
        (dcp.index_key("w", (row, 0)), dcp.info("__0_0.distcp", row * 100, 100)) for row in range(count)
    ]
    started = time.process_time()
    index = parse_index(draft.index(), where="it")
    assert len(index.tensors[0].chunks) == count
    assert time.process_time() - started < 2
