"""Moving runs of bytes: kernel and buffer give the same bytes, and where the kernel cannot, the buffer does."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from fsdplaunch.errors import CheckpointError


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, 0])
def test_merge_where_the_kernel_copies_nothing_gives_the_same_file_and_tries_once(
    dcp, rows, tmp_path, monkeypatch, code
):
    checkpoint, calls = rows.save(tmp_path / "ckpt"), []
    merge(checkpoint, tmp_path / "kernel")

    def fail(*_):
        calls.append(1)
        if code:
            raise OSError(code, os.strerror(code))
        return 0  # as some file systems do

    monkeypatch.setattr(os, "copy_file_range", fail)
    merge(checkpoint, tmp_path / "buffer", options=MergeOptions(verify=True))
    assert dcp.tree(tmp_path / "kernel") == dcp.tree(tmp_path / "buffer")
    assert len(calls) == 1


def test_merge_to_another_file_system_gives_the_same_file(dcp, rows, tmp_path):
    checkpoint = rows.save(tmp_path / "ckpt")
    merge(checkpoint, tmp_path / "here")
    places = (Path("/dev/shm"), Path("/run/user") / str(os.getuid()), Path("/var/tmp"))
    usable = (place for place in places if place.is_dir() and os.access(place, os.W_OK))
    place = next((place for place in usable if place.stat().st_dev != tmp_path.stat().st_dev), tmp_path)
    with tempfile.TemporaryDirectory(dir=place) as other:
        merge(checkpoint, Path(other) / "there", options=MergeOptions(verify=True))
        assert dcp.tree(Path(other) / "there") == dcp.tree(tmp_path / "here")


MEASURED = """
import re, sys
from pathlib import Path
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
merge(Path(sys.argv[1]), Path(sys.argv[2]), options=MergeOptions(verify=True))
print(re.search("VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_memory_does_not_grow_with_the_checkpoint(dcp, tmp_path):
    peaks = []
    for megabytes in (1, 64):
        count = megabytes * 2**18 // 2
        draft = dcp.Draft().add("rows", (count,), data=bytes(4 * count))
        halves = [((0, 0), (64, count // 128)), ((0, count // 128), (64, count // 128))]
        draft.add("columns", (64, count // 64), halves, data=bytes(4 * count))
        folder = draft.save(tmp_path / f"ckpt{megabytes}")
        command = [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / f"out{megabytes}")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        peaks.append(int(done.stdout))
        shutil.rmtree(folder)
    assert peaks[1] - peaks[0] < 30_000  # KiB


def test_merge_opens_few_files_at_a_time(dcp, tmp_path, monkeypatch):
    monkeypatch.setattr("fsdplaunch.checkpoint.readers.data_files.MAX_OPEN", 3)
    draft = dcp.Draft()
    shape, boxes = (40, 2), [((row, 0), (1, 2)) for row in range(40)]
    data = dcp.pattern(40 * 8)
    draft.entries["model.w"] = dcp.tensor_entry("float32", shape, boxes)
    draft.planner["model.w"] = ("model", "w")
    for row, (offsets, sizes) in enumerate(boxes):
        part = dcp.cut(data, shape, offsets, sizes, 4)
        draft.put("model.w", offsets, dcp.zipped(dcp.described("float32", sizes), part), f"__{row}_0.distcp")
    checkpoint = draft.save(tmp_path / "ckpt")
    most, real = [0], os.open

    def counting(*args, **kwargs):
        fd = real(*args, **kwargs)
        most[0] = max(most[0], open_files())
        return fd

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    start = open_files()
    monkeypatch.setattr(os, "open", counting)
    merge(checkpoint, tmp_path / "out", options=MergeOptions(verify=True))
    assert most[0] - start < 10
    assert dcp.safetensors(tmp_path / "out/model.safetensors")["w"][2] == data


@pytest.mark.parametrize(
    ("most_open", "size", "message"),
    [(1, 10_000, r"__0_0.distcp changed while it was read"), (128, 0, r"a data file ends \d+ bytes early")],
    ids=["opened again", "kept open"],
)
def test_data_file_that_changes_during_the_merge_is_noticed(dcp, tmp_path, monkeypatch, most_open, size, message):
    monkeypatch.setattr("fsdplaunch.checkpoint.readers.data_files.MAX_OPEN", most_open)
    monkeypatch.setattr("fsdplaunch.checkpoint.byte_transfer.STEP", 8)
    monkeypatch.setattr("fsdplaunch.checkpoint.merge.PROGRESS_SECONDS", 0)
    draft = dcp.Draft().add("v", (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))])
    checkpoint = draft.add("w", (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))]).save(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=message):
        merge(checkpoint, tmp_path / "out", progress=lambda *_: os.truncate(checkpoint / "__0_0.distcp", size))
    assert not (tmp_path / "out").exists()
