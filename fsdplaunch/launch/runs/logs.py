"""The files with a run's output, and what has been added to them since the last look."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fsdplaunch.launch.runs.registry import Run
from fsdplaunch.run_dir import open_file, rank_folder


def log_files(run: Run, *, rank: int | None, stream: str) -> list[Path]:
    """Return the files with a run's output, oldest first.

    Args:
        run: Which.
        rank: One rank's own; None for what the launcher showed, or rank 0's where that was not kept.
        stream: `stdout` or `stderr`, of a rank.
    """
    if rank is None and run.route == "slurm":
        if run.task is not None:
            return list(run.dir.parent.glob(f"slurm-{run.job['job']}.out"))
        return sorted(run.dir.glob("slurm-*.out"), key=lambda path: (len(path.name), path.name))
    found = run.dir.rglob(str(rank_folder(Path(), rank or 0) / f"{stream}*.log"))
    return sorted(found, key=lambda path: path.stat().st_mtime)


class LogTail:
    """What has been added to some files since the last look; files may come later.

    Args:
        root: Where the files are of several tasks, each one's part begins with its name, as seen from here.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._seen: dict[Path, int] = {}
        self._last: Path | None = None

    def read(self, files: Sequence[Path]) -> bytes:
        """Return the new bytes, file by file."""
        return b"".join(self._header(path) + part for path in files if (part := self._part(path)))

    def _part(self, path: Path) -> bytes:
        with suppress(OSError), open_file(path) as file:
            file.seek(self._seen.get(path, 0))
            part = file.read()
            self._seen[path] = self._seen.get(path, 0) + len(part)
            return part
        return b""

    def _header(self, path: Path) -> bytes:
        if self._root is None or path == self._last:
            return b""
        self._last = path
        return f"==> {path.relative_to(self._root)} <==\n".encode()
