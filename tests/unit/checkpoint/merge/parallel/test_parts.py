"""A merge in parts gives what a merge in one gives, whoever is killed, started again or late."""

import os
import pkgutil
import signal
from dataclasses import replace

import pytest

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from fsdplaunch.checkpoint.merge.parallel import files_of_part, remove_parts
from fsdplaunch.errors import CheckpointError, UsageError

MANY_FILES = MergeOptions(max_shard_size=300, copy_from=None)


@pytest.fixture
def checkpoint(dcp, tmp_path):
    """A checkpoint whose merge has seven files, one of them larger than the others."""
    draft = dcp.Draft()
    for number in range(6):
        draft.add(f"layers.{number}.weight", (8, 8), [((0, 0), (5, 8)), ((5, 0), (3, 8))])
    draft.add("embed", (20, 20), [((0, 0), (20, 9)), ((0, 9), (20, 11))])
    return draft.save(tmp_path / "ckpt")


def part(number, count=3, options=MANY_FILES):
    return replace(options, part=(number, count))


def forked(act) -> int:
    """What `act` ends with in a process of its own: its number, or less than 0 for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(act() or 0)
        except BaseException:  # nothing of it may go on in the copy of the test
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(monkeypatch, function, when="before"):
    """Have a function, given by its dotted name, kill its process before it acts or afterwards."""
    original = pkgutil.resolve_name(function)

    def act(*args, **named):
        if when == "after":
            original(*args, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(function, act)


@pytest.mark.parametrize(
    "options",
    [
        MANY_FILES,
        replace(MANY_FILES, dtype="bf16", verify=True, rename=(("layers", "h"),)),
        replace(MANY_FILES, max_shard_size=10**9),
    ],
    ids=["plain", "converted", "one file"],
)
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_in_any_order_are_the_merge_in_one(dcp, checkpoint, tmp_path, options, order):
    merge(checkpoint, tmp_path / "one", options=options)
    results = [merge(checkpoint, tmp_path / "out", options=part(number, 3, options)) for number in order]
    assert dcp.tree(tmp_path / "out") == dcp.tree(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "one", "out"]
    # One file is complete when its part has written it; the other parts find it.
    if options.max_shard_size < 10**9:
        assert [result.is_in_place for result in results] == [False, False, True]
        assert results[0].waiting == tuple(sorted(order[1:]))
    assert results[-1].tensors == 7


def test_every_file_is_in_one_part_and_parts_are_even(checkpoint, tmp_path):
    from fsdplaunch.checkpoint.merge.merge import prepare_merge

    files = prepare_merge(checkpoint, MANY_FILES).plan.files
    for count in (1, 2, 3, 7, 9):
        shares = [files_of_part(files, number, count) for number in range(1, count + 1)]
        assert sorted(file.name for share in shares for file in share) == [file.name for file in files]
        loads = [sum(file.nbytes for file in share) for share in shares]
        assert max(loads) - min(loads) <= max(file.nbytes for file in files)


def test_checkpoint_goes_when_the_last_part_is_there(dcp, checkpoint, tmp_path):
    before = dcp.tree(checkpoint)
    merge(checkpoint, tmp_path / "one", options=MANY_FILES)
    options = replace(MANY_FILES, remove_checkpoint_dir=True)
    for number in (1, 2):
        assert not merge(checkpoint, tmp_path / "out", options=part(number, 3, options)).removed
        assert dcp.tree(checkpoint) == before
    assert merge(checkpoint, tmp_path / "out", options=part(3, 3, options)).removed
    assert dcp.tree(tmp_path / "out") == dcp.tree(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out"]


@pytest.mark.parametrize("where", ["writing", "keeping", "completing", "before the move", "after the move"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_part_is_started_again(dcp, checkpoint, tmp_path, monkeypatch, where, overwrite):
    options = replace(MANY_FILES, overwrite=overwrite)
    merge(checkpoint, tmp_path / "one", options=options)
    if overwrite:  # an earlier result of the same names, and a file beside it
        merge(checkpoint, tmp_path / "out", options=replace(options, exclude=("embed",)))
        (tmp_path / "out/notes.txt").write_text("mine")
    merge(checkpoint, tmp_path / "out", options=part(1, 2, options))
    function, when = {
        "writing": ("fsdplaunch.checkpoint.merge.merge.write_plan", "after"),
        "keeping": ("fsdplaunch.checkpoint.merge.parallel._write", "before"),
        "completing": ("fsdplaunch.checkpoint.merge.merge._complete", "after"),
        "before the move": ("fsdplaunch.checkpoint.merge.merge.publish_folder", "before"),
        "after the move": ("fsdplaunch.checkpoint.merge.merge.publish_folder", "after"),
    }[where]
    with monkeypatch.context() as patch:
        killed_at(patch, function, when)
        ended = forked(lambda: merge(checkpoint, tmp_path / "out", options=part(2, 2, options)) and 0)
        assert ended == -signal.SIGKILL
    assert (tmp_path / "out/notes.txt").exists() == overwrite  # what was there is there, at any moment
    result = merge(checkpoint, tmp_path / "out", options=part(2, 2, options))
    assert result.is_in_place
    wanted = dcp.tree(tmp_path / "one") | ({"notes.txt": b"mine"} if overwrite else {})
    assert dcp.tree(tmp_path / "out") == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "one", "out"]


def test_parts_at_the_same_time_put_one_result_in_place(dcp, checkpoint, tmp_path):
    merge(checkpoint, tmp_path / "one", options=MANY_FILES)

    def run(number):
        try:
            return 0 if merge(checkpoint, tmp_path / "out", options=part(number, 4)).is_in_place else 1
        except CheckpointError as problem:  # the other attempt of the same part came later, or had finished all
            os.write(2, problem.message.encode())
            return 2 if "another" in f"{problem.message} {problem.hint}" else 3

    for _ in range(4):
        pids = {}
        for number in (1, 2, 3, 4, 2):  # and one part twice
            pid = os.fork()
            if pid == 0:
                try:
                    os._exit(run(number))
                finally:
                    os._exit(98)
            pids[pid] = number
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert set(ended) <= {0, 1, 2}, ended
        if not (tmp_path / "out").exists():  # the part that was there twice had to be started again
            assert run(2) == 0
        assert dcp.tree(tmp_path / "out") == dcp.tree(tmp_path / "one")
        for path in (tmp_path / "out").iterdir():
            path.unlink()
        (tmp_path / "out").rmdir()
        if (tmp_path / ".out.parts").exists():  # a late attempt has begun anew
            remove_parts(tmp_path / "out")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (part(2, 4), "in 3 parts, this one is in 4"),
        (part(2, 3, replace(MANY_FILES, max_shard_size=600)), "with max_shard_size 300, this one has 600"),
        (part(2, 3, replace(MANY_FILES, dtype="fp16")), "with dtype None, this one has 'fp16'"),
        (part(2, 3, replace(MANY_FILES, verify=True)), "with verify False, this one has True"),
    ],
)
def test_part_of_another_merge_is_refused_by_name(dcp, checkpoint, tmp_path, other, said):
    merge(checkpoint, tmp_path / "out", options=part(1, 3))
    before = dcp.tree(tmp_path)
    with pytest.raises(UsageError) as caught:
        merge(checkpoint, tmp_path / "out", options=other)
    assert said in caught.value.message
    assert str(tmp_path / ".out.parts") in caught.value.message
    assert dcp.tree(tmp_path) == before


def test_part_of_another_checkpoint_is_refused(dcp, checkpoint, tmp_path):
    merge(checkpoint, tmp_path / "out", options=part(1, 3))
    draft = dcp.Draft()
    draft.add("layers.0.weight", (8, 8))
    other = draft.save(tmp_path / "other")
    with pytest.raises(UsageError) as caught:
        merge(other, tmp_path / "out", options=part(2, 3))
    assert f"of {checkpoint}, and this one, of {other}, would write other bytes" in caught.value.message


def test_finished_merge_is_not_done_again(dcp, checkpoint, tmp_path):
    for number in (1, 2):
        merge(checkpoint, tmp_path / "out", options=part(number, 2))
    before = dcp.tree(tmp_path / "out")
    late = merge(checkpoint, tmp_path / "out", options=part(1, 2))
    assert (late.is_in_place, late.removed, dcp.tree(tmp_path / "out")) == (True, False, before)
    with pytest.raises(UsageError, match=r"holds model-00001-of-00007\.safetensors already"):
        merge(checkpoint, tmp_path / "out", options=part(1, 2, replace(MANY_FILES, dtype="bf16")))
    assert not (tmp_path / ".out.parts").exists()


def test_changed_file_of_a_finished_part_is_written_again(dcp, checkpoint, tmp_path):
    merge(checkpoint, tmp_path / "one", options=MANY_FILES)
    merge(checkpoint, tmp_path / "out", options=part(1, 2))
    spoilt = next((tmp_path / ".out.parts/files").iterdir())
    spoilt.write_bytes(b"")
    assert merge(checkpoint, tmp_path / "out", options=part(2, 2)).waiting == (1,)
    assert merge(checkpoint, tmp_path / "out", options=part(1, 2)).is_in_place
    assert dcp.tree(tmp_path / "out") == dcp.tree(tmp_path / "one")


@pytest.mark.parametrize(("number", "count"), [(0, 3), (4, 3), (1, 0), (1, 10_001)])
def test_odd_part_is_refused(number, count):
    with pytest.raises(UsageError, match=f"part {number} of {count} is not one of"):
        MergeOptions(part=(number, count))
