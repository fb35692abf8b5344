"""Items that torch's ZStandard extension compressed, made here with the same compressor."""

import subprocess
import sys

import pytest
import zstandard

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, prepare_merge
from fsdplaunch.errors import CheckpointError

ZSTD = ["stream.zstd/1"]


def pack(data: bytes) -> bytes:
    """What the extension writes: a stream, whose header does not say how long it will be."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


def packed(draft, dcp, change=pack, descriptors=ZSTD):
    """The same checkpoint with every item compressed."""
    raw, draft.files, storage = draft.files, {}, draft.storage
    draft.storage = []
    for key, place in storage:
        where = place.state
        item = raw[where["relative_path"]][where["offset"] : where["offset"] + where["length"]]
        content, file = change(item), where["relative_path"]
        start = len(draft.files.setdefault(file, b""))
        draft.files[file] += content
        draft.storage.append((key, dcp.info(file, start, len(content), transform_descriptors=descriptors)))
    return draft


def assert_refused(folder, tmp_path, message, **options):
    with pytest.raises(CheckpointError, match=message) as caught:
        merge(folder, tmp_path / "out", options=MergeOptions(**options))
    assert not (tmp_path / "out").exists()
    return caught.value


def test_compressed_items_are_merged_like_others(dcp, rows, tmp_path):
    rows.add("cut", (6, 8), [((0, 0), (6, 3)), ((0, 3), (6, 5))])
    rows.add("turned", (4, 3), item=lambda part, sizes: dcp.zipped(dcp.described("float32", sizes, (1, 4)), part))
    plain = merge(rows.save(tmp_path / "plain"), tmp_path / "from-plain")
    result = merge(packed(rows, dcp).save(tmp_path / "ckpt"), tmp_path / "out", options=MergeOptions(verify=True))
    assert result.verified
    assert result.tensors == plain.tensors == 6
    assert result.skipped == plain.skipped == ("model.step",)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "from-plain" / name).read_bytes()


def test_parts_that_are_read_in_turns_come_out_right(dcp, tmp_path):
    boxes = [((0, at * 100), (3000, 100)) for at in range(12)]  # more than streams are kept open
    data = bytes(range(251)) * 57371
    draft = dcp.Draft().add("w", (3000, 1200), boxes, data=data[: 3000 * 1200 * 4])
    folder = packed(draft, dcp).save(tmp_path / "ckpt")
    merge(folder, tmp_path / "out", options=MergeOptions(verify=True))
    assert dcp.safetensors(tmp_path / "out/model.safetensors")["w"][2] == draft.expected["w"]


def test_plan_says_which_items_are_compressed(dcp, tmp_path):
    folder = packed(dcp.Draft().add("w", (400,), data=bytes(1600)), dcp).save(tmp_path / "ckpt")
    (copy,) = prepare_merge(folder).to_dict()["files"][0]["tensors"][0]["copies"]
    assert copy["offset"] == 0
    assert copy["compressed"] == (folder / "__0_0.distcp").stat().st_size < 1600


MEASURED = """
import re, sys
from pathlib import Path
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from fsdplaunch.errors import CheckpointError
try:
    merge(Path(sys.argv[1]), Path(sys.argv[2]), options=MergeOptions(verify=True))
    print("merged")
except CheckpointError as problem:
    print(problem.message)
print("torch" in sys.modules)
print(re.search("VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def measured(folder, output) -> tuple[str, int]:
    """What a merge in a process of its own says, and the most memory it takes, in KiB."""
    command = [sys.executable, "-c", MEASURED, str(folder), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    message, torch, peak = done.stdout.splitlines()
    assert torch == "False"
    return message, int(peak)


def test_item_that_grows_beyond_its_tensor_is_refused_in_little_memory(dcp, tmp_path):
    compressor = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(compressor.compress(bytes(2**20)) for _ in range(1024)) + compressor.flush()
    assert len(bomb) < 2**20
    folder = packed(dcp.Draft().add("w", (4,)), dcp, lambda _: bomb).save(tmp_path / "ckpt")
    message, peak = measured(folder, tmp_path / "out")
    assert "bytes grow to more than 4194320, which is more than it can hold" in message
    assert "'model.w' at byte 0" in message
    assert peak < 60_000
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_a_compressed_tensor(dcp, tmp_path):
    draft = dcp.Draft().add("w", (24 * 2**20,), data=bytes(96 * 2**20))
    folder = packed(draft, dcp).save(tmp_path / "ckpt")
    message, peak = measured(folder, tmp_path / "out")
    assert message == "merged"
    assert peak < 80_000


def test_window_larger_than_the_extension_uses_is_refused(dcp, tmp_path):
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=25)

    def pack_widely(data):
        compressor = zstandard.ZstdCompressor(compression_params=wide).compressobj()
        return compressor.compress(data) + compressor.flush()

    folder = packed(dcp.Draft().add("w", (4,)), dcp, pack_widely).save(tmp_path / "ckpt")
    assert_refused(folder, tmp_path, "cannot be decompressed: .*memory")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda item: item, "cannot be decompressed"),
        (lambda item: pack(item)[:-20], "cannot be read"),
        (lambda item: pack(item[:-20]), "is not the end of a torch.save file"),
        (lambda item: pack(item + b"more"), "is not the end of a torch.save file"),
        (lambda item: b"", "too short to be a tensor"),
    ],
)
def test_damaged_compressed_item_is_refused(dcp, tmp_path, change, message):
    folder = packed(dcp.Draft().add("w", (4000,)), dcp, change).save(tmp_path / "ckpt")
    assert_refused(folder, tmp_path, message)


def test_data_that_misses_its_checksum_is_found_out(dcp, tmp_path):
    draft = dcp.Draft().add("w", (4000,))
    changed = draft.expected["w"][:7000] + b"\x55" * 8 + draft.expected["w"][7008:]
    folder = packed(draft, dcp, lambda item: pack(item.replace(draft.expected["w"], changed))).save(tmp_path / "c")
    assert_refused(folder, tmp_path, "checksum", verify=True)


def test_flipped_bytes_give_the_right_tensor_or_an_error(dcp, tmp_path):
    draft = dcp.Draft().add("w", (300,))
    folder = packed(draft, dcp).save(tmp_path / "ckpt")
    path, refused = folder / "__0_0.distcp", 0
    raw = path.read_bytes()
    for place in range(0, len(raw), 13):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x21]) + raw[place + 1 :])
        out = tmp_path / f"out{place}"
        try:
            merge(folder, out, options=MergeOptions(verify=True))
        except CheckpointError:
            refused += 1
        else:
            assert dcp.safetensors(out / "model.safetensors")["w"][2] == draft.expected["w"], place
    assert refused > 20


def test_missing_package_is_named_with_the_way_to_get_it(dcp, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    folder = packed(dcp.Draft().add("w", (4,)), dcp).save(tmp_path / "ckpt")
    problem = assert_refused(folder, tmp_path, "compressed with zstd, and the package zstandard is not installed")
    assert problem.hint == "install it with: pip install 'fsdplaunch[zstd]'"


@pytest.mark.parametrize("descriptors", [["stream.zstd/2"], ["mine/1"], ["stream.zstd/1", "mine/1"]])
def test_other_extensions_are_refused_by_name(dcp, tmp_path, descriptors):
    folder = packed(dcp.Draft().add("w", (4,)), dcp, descriptors=descriptors).save(tmp_path / "ckpt")
    problem = assert_refused(folder, tmp_path, f"'model.w' is stored through '{', '.join(descriptors)}'")
    assert "only zstd" in problem.hint
