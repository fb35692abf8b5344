"""What a search keeps in its folder: what was asked, and every outcome in order, so that it can go on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdplaunch.errors import UsageError
from fsdplaunch.run_dir import PRIVATE_MODE, read_json, write_json
from fsdplaunch.tune.candidate import Candidate
from fsdplaunch.tune.outcome import Outcome, outcome_of
from fsdplaunch.tune.rows import SearchStopped

STATE = "tune.json"
SUFFIX = "-tune"
"""What the name of a search's folder ends with."""


@dataclass(slots=True, kw_only=True)
class TuneState:
    """A search on disk.

    Attributes:
        folder: Of the search.
        request: What was asked: script, arguments, options, as plain data.
        outcomes: Changes, steps and outcome of each launch, in order.
    """

    folder: Path
    request: Mapping[str, Any]
    outcomes: list[tuple[Mapping[str, Any], int, Outcome]] = field(default_factory=list)

    def write(self) -> None:
        """Write it, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        outcomes = [
            {"changes": changes, "steps": steps, "outcome": outcome.to_dict()}
            for changes, steps, outcome in self.outcomes
        ]
        write_json(self.folder / STATE, {"request": self.request, "outcomes": outcomes}, mode=PRIVATE_MODE)

    def trial(self, launch: Callable[[Candidate, int, int], Outcome]) -> Callable[[Candidate, int], Outcome]:
        """Return what gives the outcomes that are known, one after the other, and launches for the next ones.

        Args:
            launch: Takes the candidate, the number of the launch and the steps.
        """
        at = 0

        def run(candidate: Candidate, steps: int) -> Outcome:
            nonlocal at
            known = self.outcomes[at] if at < len(self.outcomes) else None
            at += 1
            if known is not None and known[:2] == (candidate.to_dict(), steps):
                return known[2]
            del self.outcomes[at - 1 :]  # what came after belongs to another course
            outcome = launch(candidate, at, steps)
            if outcome.kind == "stopped":
                raise SearchStopped(outcome.failure)
            self.outcomes.append((candidate.to_dict(), steps, outcome))
            self.write()
            return outcome

        return run


def find_state(name: str, log_dir: Path) -> TuneState:
    """Return the search of a folder, or of a name in the folder of the runs.

    Args:
        name: `--resume`'s value: a path, a name, its beginning, or its end before `-tune`.
        log_dir: Where runs are.

    Raises:
        UsageError: There is none, more than one, or its file is broken.
    """
    given = Path(name)
    folders = [given] if (given / STATE).is_file() else []
    if not folders and log_dir.is_dir():
        all_of_them = [path for path in log_dir.iterdir() if (path / STATE).is_file()]
        folders = [
            path for path in all_of_them if path.name.startswith(name) or path.name.endswith((name, name + SUFFIX))
        ]
    if len(folders) != 1:
        count = f"{len(folders)} searches" if folders else "no search"
        msg = f"--resume {name}: {count} by this name"
        raise UsageError(msg, hint=f"name the folder of one, {log_dir}/...{SUFFIX}")
    return _read(folders[0].absolute())


def _read(folder: Path) -> TuneState:
    data = read_json(folder / STATE)
    try:
        outcomes: list[tuple[Mapping[str, Any], int, Outcome]] = [
            (dict(one["changes"]), int(one["steps"]), outcome_of(one["outcome"])) for one in data["outcomes"]
        ]
        return TuneState(folder=folder, request=dict(data["request"]), outcomes=outcomes)
    except (KeyError, TypeError, ValueError) as error:
        raise broken_state(folder) from error


def broken_state(folder: Path) -> UsageError:
    """Return the error for a search whose file cannot be read."""
    msg = f"{folder / STATE} is not the file of a search"
    return UsageError(msg, hint="start again without --resume")
