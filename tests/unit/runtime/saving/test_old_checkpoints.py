"""keep_last deletes what saves wrote, and nothing else; whatever stands in its way, no save fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplaunch.checkpoint import output_folder
from fsdplaunch.checkpoint.manifest import find_gap, write_manifest
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving import checkpoint_dirs, save_job
from fsdplaunch.runtime.saving.checkpoint_dirs import begin, find_checkpoint, next_sequence, publish, remove_old


def save(root: Path, step: int) -> Path:
    """Write a checkpoint as a save does."""
    target = root / f"checkpoint-{step}"
    partial = begin(target)
    (partial / "pytorch_model_fsdp_0").mkdir()
    (partial / "pytorch_model_fsdp_0" / ".metadata").write_text("index")
    (partial / "extra.bin").write_text("x")
    write_manifest(partial, {}, step)
    publish(partial, target)
    return target


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_files_of_others_in_old_checkpoints_stay_and_are_named(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    old = tmp_path / "checkpoint-1"
    (old / "pytorch_model_fsdp_0" / "notes").mkdir()
    (old / "pytorch_model_fsdp_0" / "notes" / "mine.txt").write_text("kept")
    (old / "link").symlink_to("/etc")
    (note,) = remove_old(tmp_path, 2)
    assert note == f"{old} is kept for what is not part of the checkpoint: link and 1 more"
    left = {str(path.relative_to(old)) for path in old.rglob("*")}
    inside = "pytorch_model_fsdp_0"
    assert left == {"link", inside, f"{inside}/notes", f"{inside}/notes/mine.txt"}
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    assert remove_old(tmp_path, 2) == []  # it is not a checkpoint any more
    assert find_checkpoint(tmp_path)[0] == tmp_path / "checkpoint-3"
    assert find_gap(old) is not None
    assert Path("/etc").is_dir()


def test_removal_that_was_killed_half_way_keeps_them_too(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    hidden = tmp_path / ".checkpoint-1.removed"
    (tmp_path / "checkpoint-1").rename(hidden)
    (hidden / "mine.txt").write_text("kept")
    (hidden / "extra.bin").unlink()
    remove_old(tmp_path, 1)
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2"}
    assert names(tmp_path / "checkpoint-1") == {"mine.txt"}


def test_links_go_and_what_they_lead_to_stays(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    real = save(elsewhere, 1)
    for step in (2, 3):
        save(root, step)
    (root / "checkpoint-1").symlink_to(real)
    (root / "checkpoint-9").symlink_to("checkpoint-9")
    (root / "checkpoint-8").symlink_to("nowhere")
    (root / ".checkpoint-7.partial").symlink_to(elsewhere)
    (root / ".checkpoint-6.removed").symlink_to(elsewhere)
    assert remove_old(root, 1) == []
    assert names(root) == {"checkpoint-3", "checkpoint-8", "checkpoint-9"}
    assert find_gap(real) is None
    # in the way of a save they are replaced
    (root / ".checkpoint-4.partial").symlink_to(elsewhere)
    (root / ".checkpoint-4.old").symlink_to(elsewhere)
    (root / "checkpoint-5").symlink_to(real)
    for step in (4, 5, 4, 5):
        assert find_gap(save(root, step)) is None
    assert names(elsewhere) == {"checkpoint-1"}


def test_what_cannot_be_removed_is_said_and_no_error(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 4)
    locked, mounted, may = tmp_path / "checkpoint-3", tmp_path / "checkpoint-2", os.access

    def refuse(*_: object, **__: object) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda path: path == mounted)
        patch.setattr(os, "fwalk", refuse)
        patch.setattr(os, "access", lambda path, mode: Path(path) != locked and may(path, mode))
        busy, kept, whole = sorted(remove_old(tmp_path, 1))
    assert busy.endswith("checkpoint-1.removed is not deleted: device or resource busy")
    assert kept == f"{mounted} is not deleted: it is a mounted disk"
    assert whole == f"{locked} is not deleted: it is not writable"
    assert find_gap(locked) is None
    assert names(tmp_path) == {".checkpoint-1.removed", "checkpoint-2", "checkpoint-3", "checkpoint-4"}
    monkeypatch.setattr(Path, "rename", refuse)
    assert len(remove_old(tmp_path, 0)) == 3
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}


def test_what_has_come_into_the_place_of_an_old_checkpoint_stays(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    hide = checkpoint_dirs._set_aside

    def replaced_before(path: Path, known: object) -> str | None:
        save(tmp_path, 1)
        (path / "extra.bin").write_text("y")
        write_manifest(path, {"id": "another"}, 3)
        return hide(path, known)

    monkeypatch.setattr(checkpoint_dirs, "_set_aside", replaced_before)
    assert remove_old(tmp_path, 1) == [f"{tmp_path}/checkpoint-1 is not deleted: another save has taken its place"]
    assert (tmp_path / "checkpoint-1" / "extra.bin").read_text() == "y"


def test_old_checkpoint_that_cannot_be_read_any_more_keeps_its_name(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    read = checkpoint_dirs.read_manifest

    def fail_once_hidden(folder: Path) -> object:
        if folder.name.startswith("."):
            msg = "fsdplaunch.json cannot be read"
            raise CheckpointError(msg)
        return read(folder)

    monkeypatch.setattr(checkpoint_dirs, "read_manifest", fail_once_hidden)
    assert remove_old(tmp_path, 1) == [f"{tmp_path}/checkpoint-1 is not deleted: fsdplaunch.json cannot be read"]
    assert find_gap(tmp_path / "checkpoint-1") is None


@pytest.mark.parametrize("atomic", [True, False])
def test_folder_of_another_program_is_not_replaced_and_what_comes_late_is_kept(tmp_path, monkeypatch, atomic):
    target, other, keep = save(tmp_path, 1), save(tmp_path, 2), output_folder.keep_entries
    happen = [lambda: (target / "late.txt").write_text("kept")]
    if not atomic:
        monkeypatch.setattr(output_folder, "rename_exchange", lambda *_: False)

    def meanwhile(entries, folder):
        keep(entries, folder)
        if folder.name.endswith(".partial"):
            happen.pop()()

    monkeypatch.setattr(output_folder, "keep_entries", meanwhile)
    save(tmp_path, 1)
    assert names(target) >= {"late.txt", "fsdplaunch.json"}

    happen.append(lambda: (target.rename(tmp_path / "gone"), other.rename(target)))
    (other / "whose").write_text("theirs")
    with pytest.raises(CheckpointError, match="checkpoint-1 was replaced by another program in the meantime"):
        save(tmp_path, 1)
    assert (target / "whose").read_text() == "theirs"


HOLDS = """
import os, sys, time
from pathlib import Path
from fsdplaunch.runtime.saving.save_job import lock_for_run
root = Path(sys.argv[1])
target = root / "checkpoint-1" if sys.argv[2] == "numbered" else root
lock_for_run(target)
forked, tells = os.pipe()
if os.fork() == 0:
    os.write(tells, b".")  # Python's own code after a fork has run by now
    time.sleep(60)
os.read(forked, 1)
print("held", os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("kind", "end", "ours"),
    [
        ("numbered", "killed", "checkpoint-2"),
        ("single", "done", ""),
        ("numbered", "done", ""),
        ("single", "killed", "checkpoint-2"),
    ],
)
def test_run_keeps_others_out_until_it_ends_however_it_does(tmp_path, monkeypatch, kind, end, ours):
    monkeypatch.setattr(save_job, "_LOCK_SECONDS", 0.0)
    root = tmp_path / "ckpt"
    root.mkdir()
    target = root / ours
    code = f"import os; os.setsid()\n{HOLDS}"
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(root), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        pid = int(run.stdout.readline().split()[1])
        with pytest.raises(Exception, match=f"ckpt is being written by process {pid} on {os.uname().nodename}"):
            save_job.lock_for_run(target)
        assert not save_job.is_locked(target)
        if end == "killed":
            run.kill()  # its fork lives on, and has let go
        run.stdin.close()
        run.wait()
        for _ in range(2):
            save_job.lock_for_run(target)
        assert save_job.is_locked(target)
        save_job._release_all()
        assert names(root) == set()
        assert names(tmp_path) == {"ckpt"}
    finally:
        os.killpg(pid, 9)


def test_outside_of_a_launch_the_lock_lasts_as_long_as_a_save(tmp_path, monkeypatch):
    target = tmp_path / "checkpoint-1"
    for in_launch in (False, True):
        if in_launch:
            monkeypatch.setenv("FSDPLAUNCH_RUN_DIR", "runs/r1")
        save_job.lock_for_run(target)
        assert save_job.is_locked(target)
        save_job.end_save(target)
        assert save_job.is_locked(target) is in_launch
    save_job._release_all()
    assert names(tmp_path) == set()


def fail_to_read(monkeypatch, path: Path, times: int) -> None:
    """Have a file server answer so many reads of a file with an error."""
    left, really = [times], os.open

    def opened(name, *args, **named):
        if Path(name) == path and left[0]:
            left[0] -= 1
            raise OSError(116, "Stale file handle")
        return really(name, *args, **named)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr("fsdplaunch.checkpoint.manifest._PAUSES", (0, 0))


def test_manifest_that_cannot_be_read_is_an_error_and_nothing_is_deleted(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    with monkeypatch.context() as patch:
        fail_to_read(patch, tmp_path / "checkpoint-3" / "fsdplaunch.json", 2)
        assert next_sequence(tmp_path / "checkpoint-4") == 4  # after another try
    fail_to_read(monkeypatch, tmp_path / "checkpoint-3" / "fsdplaunch.json", 10**6)
    for read in (next_sequence, find_checkpoint):
        with pytest.raises(
            CheckpointError, match=r"checkpoint-3/fsdplaunch.json cannot be read: stale file handle"
        ):
            read(tmp_path / "checkpoint-4" if read is next_sequence else tmp_path)
    (note,) = remove_old(tmp_path, 1)
    assert note.startswith("nothing is deleted: ")
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}


def test_newest_checkpoint_with_a_file_that_cannot_be_looked_at_is_not_passed_over(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    newest = tmp_path / "checkpoint-2"
    file = next(path for path in sorted(newest.rglob("*")) if path.is_file() and path.suffix != ".json")
    left, really = [2], os.stat

    def stat(path, *args, **named):
        if Path(path) == file and left[0]:
            left[0] -= 1
            raise OSError(116, "Stale file handle")
        return really(path, *args, **named)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr("fsdplaunch.checkpoint.manifest._PAUSES", (0, 0))
    assert find_checkpoint(tmp_path) == (newest, [])  # after another try
    left[0] = 10**6
    with pytest.raises(CheckpointError, match=f"{file.name} cannot be read: stale file handle"):
        find_checkpoint(tmp_path)
    (note,) = remove_old(tmp_path, 1)
    assert note.startswith("nothing is deleted: ")
    monkeypatch.undo()
    file.unlink()
    assert find_checkpoint(tmp_path)[0] == tmp_path / "checkpoint-1"
