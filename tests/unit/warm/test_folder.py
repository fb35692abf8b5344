"""The folder with the sockets is this user's alone, or it is not used."""

import os

import pytest

from fsdplaunch.warm import UnsafeFolderError, connect, folder_path, listen, opened_folder


def test_it_stands_in_the_runtime_folder_where_that_is_private(tmp_path):
    tmp_path.chmod(0o700)
    assert folder_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"{tmp_path}/fsdplaunch_warm"
    own = f"/tmp/fsdplaunch_warm-{os.geteuid()}"
    assert folder_path({}) == folder_path({"XDG_RUNTIME_DIR": "relative"}) == own
    tmp_path.chmod(0o777)
    assert folder_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == own


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_folder_that_others_may_enter_is_refused(tmp_path, mode):
    place = tmp_path / "f"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(UnsafeFolderError, match="not yours alone"), opened_folder(str(place)):
        pass


def test_link_and_file_are_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(UnsafeFolderError, match="is not a folder"), opened_folder(str(tmp_path / name)):
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away takes root")
def test_another_users_folder_is_refused(tmp_path):
    place = tmp_path / "f"
    place.mkdir(mode=0o700)
    os.chown(place, 65534, -1)
    with pytest.raises(UnsafeFolderError, match="owner 65534"), opened_folder(str(place)):
        pass


def test_newer_one_takes_the_place_of_an_older_and_a_dead_one_is_removed(tmp_path):
    with opened_folder(str(tmp_path / "f"), make=True) as folder:
        first, _ = listen(folder, "n")
        second, _ = listen(folder, "n")
        end = connect(folder, "n")
        assert second.accept()[0] is not None
        with pytest.raises(BlockingIOError):
            first.accept()
        for one in (first, second, end):
            one.close()
        assert [path.name for path in (tmp_path / "f").iterdir()] == ["n.sock"]
        assert connect(folder, "n") is None
        assert not list((tmp_path / "f").iterdir())
        assert connect(folder, "other") is None


def test_one_that_answers_nobody_is_not_waited_for(tmp_path):
    with opened_folder(str(tmp_path / "f"), make=True) as folder:
        listener, _ = listen(folder, "n")  # stopped, and with a launch after the other in its queue
        ends = [connect(folder, "n") for _ in range(40)]
        assert ends[0] is not None
        assert ends[-1] is None
        for end in (listener, *filter(None, ends)):
            end.close()
