"""A merge by several processes gives the same bytes; when one of them fails, all end and nothing is left."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.merge import write
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, prepare_merge
from fsdplaunch.checkpoint.merge.options import ProgressMeter
from fsdplaunch.checkpoint.merge.parallel import run_jobs, split_by_tensors
from fsdplaunch.errors import CheckpointError, UsageError


@pytest.fixture
def checkpoint(dcp, tmp_path):
    draft = dcp.Draft()
    for number in range(9):
        draft.add(f"layers.{number}.weight", (8, 8), [((0, 0), (8, 3)), ((0, 3), (8, 5))])
    draft.add("empty", (0, 4))
    return draft.save(tmp_path / "ckpt")


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize(
    "options",
    [
        MergeOptions(),
        MergeOptions(max_shard_size=700, verify=True),
        MergeOptions(dtype="bf16", max_shard_size=300),
    ],
    ids=["one file", "several", "converted"],
)
@pytest.mark.parametrize("jobs", [2, 5, 40])
def test_processes_write_what_one_writes(dcp, checkpoint, tmp_path, options, jobs):
    seen = []
    merge(checkpoint, tmp_path / "one", options=options)
    before = children()
    result = merge(checkpoint, tmp_path / "out", options=replace(options, jobs=jobs), progress=seen.append)
    assert dcp.tree(tmp_path / "out") == dcp.tree(tmp_path / "one")
    assert (result.tensors, children()) == (10, before)
    assert [now.done for now in seen if now.done == now.total]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "one", "out"]


def test_parts_and_processes_go_together(dcp, checkpoint, tmp_path):
    options = MergeOptions(max_shard_size=300, jobs=2)
    merge(checkpoint, tmp_path / "one", options=replace(options, jobs=1))
    for number in (2, 1):
        merge(checkpoint, tmp_path / "out", options=replace(options, part=(number, 2)))
    assert dcp.tree(tmp_path / "out") == dcp.tree(tmp_path / "one")


def test_tensors_are_shared_out_once_and_evenly(checkpoint):
    files = prepare_merge(checkpoint, MergeOptions(max_shard_size=700)).plan.files
    names = [tensor.name for file in files for tensor in file.tensors]
    for count in (1, 2, 3, 20):
        shares = split_by_tensors(files, count)
        assert [tensor.name for share in shares for file in share for tensor in file.tensors] == names
        loads = [sum(tensor.nbytes for file in share for tensor in file.tensors) for share in shares]
        assert max(loads) <= sum(loads) / count + 2 * 256


def test_damage_found_by_one_process_ends_all(dcp, checkpoint, tmp_path):
    data = bytearray((checkpoint / "__1_0.distcp").read_bytes())
    at = data.rindex(b"PK\1\2") - 200
    data[at - 100 : at] = bytes(byte ^ 1 for byte in data[at - 100 : at])
    (checkpoint / "__1_0.distcp").write_bytes(data)
    with pytest.raises(CheckpointError) as alone:
        merge(checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointError) as caught:
        merge(checkpoint, tmp_path / "out", options=MergeOptions(jobs=3))
    assert (caught.value.message, caught.value.hint) == (alone.value.message, alone.value.hint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def failing(how):
    """Have the second of two processes fail while the first would run for ever."""

    def work(share, meter):
        if share == 0:
            signal.pause()
        meter.tick(7)
        how()

    run_jobs([0, 1], work, ProgressMeter("copy", 100, None))


def raise_full():
    raise OSError(28, "No space left on device", "/disk/model.safetensors")


def raise_memory():
    raise MemoryError


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (raise_full, OSError, "No space left on device: '/disk/model.safetensors'"),
        (raise_memory, MemoryError, "^$"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), CheckpointError, "of this merge was killed"),
        (lambda: os._exit(0), CheckpointError, "of this merge was killed"),
        (lambda: {}[1], RuntimeError, "KeyError: 1"),
    ],
)
def test_failure_of_one_process_is_raised_and_no_process_stays(how, kind, said):
    before = children()
    with pytest.raises(kind, match=said.replace("'", ".")):
        failing(how)
    assert children() == before


def test_ctrl_c_ends_all_processes(checkpoint, tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    before = children()
    fill = write._fill_file

    def fill_and_stay(file, *others):
        fill(file, *others)
        signal.pause()

    monkeypatch.setattr(write, "_fill_file", fill_and_stay)
    with pytest.raises(KeyboardInterrupt):
        merge(checkpoint, tmp_path / "out", options=MergeOptions(jobs=2), progress=interrupt)
    assert children() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def interrupt():
    signal.raise_signal(signal.SIGINT)


def have_no_process():
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize(("then", "error"), [(interrupt, KeyboardInterrupt), (have_no_process, BlockingIOError)])
def test_what_comes_while_processes_begin_ends_those_begun(monkeypatch, then, error):
    before, mask, fork, begun = children(), signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.fork, []
    files = len(list(Path("/proc/self/fd").iterdir()))

    def fork_and_then():
        if begun:
            then()
        begun.append(fork())
        return begun[-1]

    monkeypatch.setattr(os, "fork", fork_and_then)
    with pytest.raises(error):
        run_jobs([0, 1], lambda *_: signal.pause(), ProgressMeter("copy", 100, None))
    assert begun
    assert (children(), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == (before, mask)
    assert len(list(Path("/proc/self/fd").iterdir())) == files


@pytest.mark.parametrize("options", [{"jobs": 0}, {"jobs": 257}, {"jobs": 2, "safe_serialization": False}])
def test_odd_number_of_processes_is_refused(options):
    with pytest.raises(UsageError, match="jobs"):
        MergeOptions(**options)
