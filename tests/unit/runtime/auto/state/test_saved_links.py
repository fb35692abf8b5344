"""What rank 0 has saved is given to another rank by that rank's own name, and nothing else is."""

from pathlib import Path

import pytest

from fsdplaunch.runtime.auto.state import saved_paths
from fsdplaunch.runtime.auto.state.saved_paths import SavedPaths, note_saved


def noted(monkeypatch: pytest.MonkeyPatch, written: Path, own: Path, stamp: tuple[int, ...] | None) -> None:
    """Note, as rank 1, that rank 0 has saved a file that had this stamp."""
    monkeypatch.setattr(saved_paths, "from_all", lambda mine: [(str(written), stamp), mine])
    note_saved(SavedPaths(), str(own))


def test_file_and_folder_of_rank_0_are_linked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written, own = tmp_path / "tmp0", tmp_path / "tmp1"
    written.mkdir()
    (written / "model.pt").write_bytes(b"new")
    own.mkdir()
    (own / "model.pt").write_bytes(b"old")
    noted(monkeypatch, written, own, saved_paths._stamp(str(written)))
    assert (own / "model.pt").samefile(written / "model.pt")
    noted(monkeypatch, written / "model.pt", own / "b.pt", saved_paths._stamp(str(written / "model.pt")))
    assert (own / "b.pt").samefile(written / "model.pt")
    noted(monkeypatch, written / "model.pt", own / "b.pt", saved_paths._stamp(str(written / "model.pt")))
    assert sorted(path.name for path in own.iterdir()) == ["b.pt", "model.pt"]


def test_another_machines_file_of_that_name_is_not_linked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"of an earlier run, here")
    noted(monkeypatch, tmp_path / "a.pt", tmp_path / "b.pt", (1, 2, 3))
    noted(monkeypatch, tmp_path / "none.pt", tmp_path / "b.pt", (1, 2, 3))
    noted(monkeypatch, tmp_path / "none.pt", tmp_path / "b.pt", None)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
