"""Where a measured worker's script may write."""

import os

import pytest

from fsdplaunch.tune.measure import WriteGuard, WriteRefusedError


@pytest.fixture
def place(tmp_path):
    """A user's folder with a file, a scratch folder with a link to it, and a guard."""
    user, work = tmp_path / "user", tmp_path / "user" / "runs" / "t" / "work"
    work.mkdir(parents=True)
    (user / "data.bin").write_text("mine")
    (user / "out").mkdir()
    (work / "data.bin").symlink_to(user / "data.bin")
    (work / "out").symlink_to(user / "out")
    free = tmp_path / "cache"
    free.mkdir()
    return user, work, WriteGuard(str(user / "runs" / "t"), str(user), (str(tmp_path),))


def test_what_is_the_users_is_refused_by_any_way_in(place):
    user, work, guard = place
    ways = [
        ("open", (str(user / "new.txt"), "w", os.O_WRONLY | os.O_CREAT)),
        ("open", (str(work / "out" / "new.txt"), "w", os.O_WRONLY | os.O_CREAT)),
        ("os.mkdir", (str(user / "checkpoints"), 0o777, -1)),
        ("os.remove", (str(user / "data.bin"), -1)),
        ("os.rename", (str(work / "a"), str(user / "a"), -1, -1)),
        ("os.rename", (str(user / "data.bin"), str(work / "a"), -1, -1)),
        ("os.symlink", (str(work), str(user / "link"), -1)),
    ]
    for event, args in ways:
        with pytest.raises(WriteRefusedError, match="is outside the folder that a measured run may write to"):
            guard.audit(event, args)
    with pytest.raises(WriteRefusedError):
        guard.before_write(user / "model.safetensors")


def test_reading_the_own_folder_caches_and_folders_that_exist_are_free(place, tmp_path):
    user, work, guard = place
    guard.audit("open", (str(user / "data.bin"), "r", os.O_RDONLY | os.O_CLOEXEC))
    guard.audit("open", (str(work / "log.txt"), "w", os.O_WRONLY | os.O_CREAT))
    guard.audit("open", (str(tmp_path / "cache" / "x"), "w", os.O_WRONLY | os.O_CREAT))
    guard.audit("os.mkdir", (str(user / "out"), 0o777, -1))
    guard.audit("os.link", (str(user / "data.bin"), str(work / "copy"), -1, -1))
    guard.audit("open", (7, "w", os.O_WRONLY))
    guard.audit("import", ("torch", None, None, None, None))


def test_relative_paths_are_of_the_current_folder(place, monkeypatch):
    user, work, guard = place
    monkeypatch.chdir(work)
    guard.audit("open", ("log.txt", "w", os.O_WRONLY | os.O_CREAT))
    monkeypatch.chdir(user)
    with pytest.raises(WriteRefusedError):
        guard.audit("open", (b"log.txt", "w", os.O_WRONLY | os.O_CREAT))
