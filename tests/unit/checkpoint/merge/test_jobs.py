"""A merge by several threads gives the same bytes; when one of them fails, all end and nothing is left."""

import threading
from dataclasses import replace

import pytest

from fsdplaunch.checkpoint.merge import write
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, prepare_merge
from fsdplaunch.errors import CheckpointError, UsageError


@pytest.fixture
def checkpoint(dcp, tmp_path):
    draft = dcp.Draft()
    for number in range(9):
        draft.add(f"layers.{number}.weight", (8, 8), [((0, 0), (8, 3)), ((0, 3), (8, 5))])
    draft.add("empty", (0, 4))
    return draft.save(tmp_path / "ckpt")


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
def test_threads_write_what_one_writes(dcp, checkpoint, tmp_path, options, jobs):
    seen = []
    merge(checkpoint, tmp_path / "one", options=options)
    result = merge(checkpoint, tmp_path / "out", options=replace(options, jobs=jobs), progress=seen.append)
    assert dcp.tree(tmp_path / "out") == dcp.tree(tmp_path / "one")
    assert result.tensors == 10
    assert [now.done for now in seen if now.done == now.total]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "one", "out"]


def test_tensors_are_shared_out_once_and_evenly(checkpoint):
    files = prepare_merge(checkpoint, MergeOptions(max_shard_size=700)).plan.files
    names = [tensor.name for file in files for tensor in file.tensors]
    for count in (1, 2, 3, 20):
        shares = write.split_by_tensors(files, count)
        assert [tensor.name for share in shares for file in share for tensor in file.tensors] == names
        loads = [sum(tensor.nbytes for file in share for tensor in file.tensors) for share in shares]
        assert max(loads) <= sum(loads) / count + 2 * 256


def test_damage_found_by_one_thread_ends_all(dcp, checkpoint, tmp_path):
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


def test_ctrl_c_ends_all_threads(checkpoint, tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    released = threading.Event()
    fill = write._fill_file

    def fill_and_go_on(file, folder, sources, copier, meter, check):
        fill(file, folder, sources, copier, meter, check)
        while not released.wait(0.01):
            meter.tick(0)

    monkeypatch.setattr(write, "_fill_file", fill_and_go_on)
    with pytest.raises(KeyboardInterrupt):
        merge(checkpoint, tmp_path / "out", options=MergeOptions(jobs=2), progress=interrupt)
    assert not [each for each in threading.enumerate() if each.name.startswith("fsdplaunch-merge")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize("options", [{"jobs": 0}, {"jobs": 257}, {"jobs": 2, "safe_serialization": False}])
def test_odd_number_of_threads_is_refused(options):
    with pytest.raises(UsageError, match="jobs"):
        MergeOptions(**options)
