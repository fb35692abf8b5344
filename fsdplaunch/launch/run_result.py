"""What came of a run, read from the agent's record, and the lines that say so. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdplaunch.display_text import MOST, counted, shortened
from fsdplaunch.launch.diagnosis import Diagnosis
from fsdplaunch.launch.root_cause import Worker, brief, has_failed, own_signal, shell_status, user_frames
from fsdplaunch.run_dir import AGENT_LOG, node_folder, rank_folder, rank_log

if TYPE_CHECKING:
    from fsdplaunch.launch.step_summary import Summary

_SOURCE = re.compile(r"\[\S+\.(cc|cpp|cu):\d+\] ?")
"""Where in torch's C++ code a message comes from, which helps nobody here."""
_STUBBORN = "did not stop when asked and was killed"
_TAIL_LIMIT, _MESSAGE_LIMIT = 6, 4
"""Lines to show: of the error output where there is no exception, and of an exception's own text."""
_MOST_LISTED = 8
_WIDEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The worker that failed first."""

    rank: int | None  # its global rank, or None when the agent itself failed
    exit_code: int  # its status as a shell would see it (128 + n for signal n)
    signal: str | None = None
    message: str | None = None  # `Type: text` of its exception, or None when it left no record
    traceback: str | None = None
    local_rank: int | None = None
    pid: int | None = None
    host: str | None = None
    gpu: str | None = None  # its GPU, by number or name; None on CPU
    seconds: float | None = None  # from its start to its failure
    steps: int | None = None  # optimizer steps it had made; None when it kept no count
    tail: tuple[str, ...] = ()  # the last lines of its error output, where there was no exception
    log: str | None = None  # the file with all of its error output, inside the run's folder
    others: tuple[str, ...] = ()  # what became of the other workers, in words
    lost: tuple[str, ...] = ()  # the nodes the run could not go on without, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The end of a run."""

    exit_code: int
    seconds: float  # wall time of the whole run
    failure: Failure | None = None  # the cause, or None after success or a requested stop
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    stopped_by: str | None = None  # name of the signal that came from outside, or None
    attempts: Sequence[Mapping[str, Any]] = ()  # every attempt as the agent recorded it
    notes: Sequence[str] = ()  # what the agent said on the way
    start: Mapping[str, float] | None = None  # seconds of each part of the start; None without launch.timing
    summary: "Summary | None" = None  # of the last steps; None where no rank has made one
    unwritten: str | None = None  # why the run's folder does not hold this, as on a full disk; None when it does

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        failure = None
        if self.failure is not None:
            why = {"why": self.diagnosis.why, "try": list(self.diagnosis.remedies)}
            failure = {**asdict(self.failure), **why}
        return {
            "stage": "run",
            "exit_code": self.exit_code,
            "seconds": self.seconds,
            "failure": failure,
            "stopped_by": self.stopped_by,
            "notes": list(self.notes),
            "summary": self.summary.to_dict() if self.summary is not None else None,
            "attempts": [_attempt_summary(attempt) for attempt in self.attempts],
            **({} if self.start is None else {"start": self.start}),
        }


def _attempt_summary(attempt: Mapping[str, Any]) -> dict[str, Any]:
    start, end, cause = attempt["started_ns"], attempt["ended_ns"], attempt["cause"]
    return {
        "attempt": attempt["attempt"] + 1,
        "seconds": round((attempt.get("ran_ns") or end - start) / 1e9, 3) if start else 0.0,
        "cause": brief(cause) if cause else None,
        "ranks": [
            {
                "rank": worker["rank"],
                "exit_code": shell_status(worker["code"]) if worker["code"] is not None else None,
                "signal": worker["signal"],
                "message": _message(worker),
                "seconds": _lifetime(worker),
                "peak_bytes": worker["peak_bytes"],
                "steps": worker.get("steps"),
            }
            for worker in attempt["workers"]
        ],
    }


def read_result(
    record: Mapping[str, Any], *, exit_code: int, seconds: float = 0.0, gpus: Sequence[str] = ()
) -> RunResult:
    """Make a RunResult of the agent's record, which is empty when it ended without writing one."""
    stopped_by = record.get("stopped_by")
    return RunResult(
        exit_code=exit_code,
        seconds=seconds,
        failure=_failure(record, exit_code, gpus) if exit_code and not stopped_by else None,
        stopped_by=stopped_by,
        attempts=record.get("attempts") or [],
        notes=record.get("notes") or (),
    )


def read_start(file: Path, workers: int) -> dict[str, float]:
    """Return the seconds of each part of a start, on the way to the first attempt's script that began last."""
    notes = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    forked = {pid for pid, part, _ in notes if part == "fork"}
    last = [pid for pid, part, _ in notes if part == "script"][:workers][-1:]
    parts: dict[str, float] = {}
    chain = [note for note in notes if note[0] in last or note[0] not in forked]
    for (_, _, before), (_, part, now) in pairwise(chain):
        parts[part] = round(parts.get(part, 0.0) + (int(now) - int(before)) / 1e9, 3)
    return parts


def _failure(record: Mapping[str, Any], exit_code: int, gpus: Sequence[str]) -> Failure:
    attempts = record.get("attempts") or []
    cause = attempts[-1]["cause"] if attempts else None
    if cause is None:
        lost = tuple(record.get("lost") or ())
        return Failure(rank=None, exit_code=exit_code, message=record.get("error"), lost=lost)
    local_rank, number, node = cause["local_rank"], attempts[-1]["attempt"], cause.get("node")
    return Failure(
        rank=cause["rank"],
        exit_code=exit_code,
        signal=own_signal(cause),
        message=_message(cause),
        traceback=(cause["error"] or {}).get("traceback"),
        local_rank=local_rank,
        pid=cause["pid"],
        host=cause.get("host") or record.get("host"),
        gpu=gpus[local_rank] if local_rank < len(gpus) and not node else None,
        seconds=_lifetime(cause),
        steps=cause.get("steps"),
        tail=tuple(cause["tail"]),
        log=str(rank_log(node_folder(Path(), node or 0), cause["rank"], "stderr", number)),
        others=tuple(describe_others(cause, attempts[-1]["workers"])),
    )


def _lifetime(worker: Worker) -> float | None:
    """Return how long a worker ran until its error, or its end; never more than by the clock that nobody sets."""
    end, ran = (worker["error"] or {}).get("time_ns") or worker["ended_ns"], worker.get("ran_ns")
    if not end:
        return None
    taken: int = end - worker["started_ns"]
    return round((taken if ran is None or 0 <= taken <= ran else int(ran)) / 1e9, 3)


def _message(worker: Worker) -> str | None:
    return (worker["error"] or {}).get("message")


def describe_others(cause: Worker, workers: Sequence[Worker]) -> list[str]:
    """Say what became of the workers beside the one that failed first, alike ones together."""
    groups: dict[str, list[int]] = {}
    for worker in workers:
        if worker["rank"] != cause["rank"]:
            same = has_failed(worker) and _message(worker) == _message(cause) is not None
            groups.setdefault("failed in the same way" if same else _end_of(worker), []).append(worker["rank"])
    sentences = []
    for end, ranks in groups.items():
        who = f"{len(ranks)} other ranks" if len(ranks) > _MOST_LISTED else f"ranks {', '.join(map(str, ranks))}"
        if len(ranks) == 1:
            sentences.append(f"rank {ranks[0]} {end}")
        elif end.startswith(("was ", _STUBBORN)):
            sentences.append(f"{who} {end.replace('was ', 'were ', 1)}")
        else:
            sentences.append(f"{who} {end}")
    return sentences


def _end_of(worker: Worker) -> str:
    if has_failed(worker):
        words = _SOURCE.sub("", brief(worker).partition(" ")[2].partition(" ")[2])  # without its own number
        words = words.partition(". ")[0]
        return words if len(words) < _WIDEST else words[: _WIDEST - 3] + "..."
    if worker["code"] == 0:
        return "ended well"
    if worker["code"] is None or -worker["code"] not in worker["sent"]:
        return "did not end"
    return _STUBBORN if worker["code"] == -9 else "was stopped because of it"  # noqa: PLR2004


def duration(seconds: float) -> str:
    """Return `0.4 s`, `12 s`, `4 m 12 s`, `2 h 04 m`."""
    if seconds < 10:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left:02} m" if hours else f"{minutes} m {rest:02} s"


def failure_lines(result: RunResult, *, run_dir: str, folder: str = "", fixed_size: bool = False) -> list[str]:
    """Say which rank failed, of what, where in the user's code, why, what to try, and where the log is.

    A run of a fixed size, as a scheduler has it, cannot go on with fewer nodes.
    """
    failure = result.failure
    if failure is None:
        return []
    if failure.lost:
        hint = "is that node up, and its network?"
        hint += "" if fixed_size else " with launch.nodes: MIN:MAX the others would continue"
        return [failure.lost[0], *(f"  {line}" for line in failure.lost[1:]), "", f"  try  {hint}"]
    if failure.rank is None:
        message = [f"  {line}" for line in _ends_of(failure.message or "")]
        head = f"the run failed with exit code {failure.exit_code}, and no worker caused it"
        why = result.diagnosis.why or "the agent that watches the workers itself failed; its log has the traceback"
        remedies = [f"  try  {remedy}" for remedy in result.diagnosis.remedies]
        return [head, *message, "", f"  why  {why}", *remedies, f"  log  {run_dir}/{AGENT_LOG}"]
    lines = _failed_rank(failure, folder)
    if (tries := len(result.attempts)) > 1:
        lines.append(f"  it was attempt {tries}; the attempts before it are in result.json")
    diagnosis = result.diagnosis
    rest = [("why", diagnosis.why)] if diagnosis.why else []
    rest += [("try", remedy) for remedy in diagnosis.remedies[:1]]
    rest += [("   ", remedy) for remedy in diagnosis.remedies[1:]]
    rest = rest or [("why", "it matches no known cause: see the lines above and the log")]
    log = f"{run_dir}/{failure.log}" if failure.log else rank_folder(Path(run_dir), failure.rank)
    return [*lines, "", *(f"  {name}  {text}" for name, text in (*rest, ("log", log)))]


def _failed_rank(failure: Failure, folder: str) -> list[str]:
    how = f"was killed by {failure.signal}" if failure.signal else f"failed with exit code {failure.exit_code}"
    after = f" after {duration(failure.seconds)}" if failure.seconds is not None else ""
    steps = f", at step {failure.steps}" if failure.steps else ""
    place = [f"on {failure.host}"] if failure.host else []
    place += [f"GPU {failure.gpu}"] if failure.gpu is not None else []
    place += [f"process {failure.pid}"] if failure.pid is not None else []
    lines = [f"rank {failure.rank} {how}{after}{steps}", *([f"  {', '.join(place)}"] if place else [])]
    if failure.message is None:
        lines += [f"    {shortened(line)}" for line in failure.tail[-_TAIL_LIMIT:]]
    else:
        text = failure.message.partition("\nhint: ")[0]
        lines += [f"  {line}" for line in _ends_of(text)]
        lines += ["  (the log below has all of it)"] if len(text) > MOST else []
        lines += [f"    {frame}" for frame in user_frames(failure.traceback or "", folder=folder)]
    return lines + [f"  {words}" for words in failure.others]


def _ends_of(text: str) -> list[str]:
    """Return the lines of an exception's text; of many the first, and the last, which have the cause."""
    lines = shortened(text).splitlines()
    return lines if len(lines) <= _MESSAGE_LIMIT + 1 else [lines[0], "...", *lines[1 - _MESSAGE_LIMIT :]]


def end_line(result: RunResult, *, workers: int) -> str:
    """Say how a run without a failure ended; `workers` over all nodes."""
    if result.stopped_by is not None:
        saved = ": every worker ended cleanly, launch it again to resume" if result.exit_code == 75 else ""  # noqa: PLR2004
        return f"stopped by {result.stopped_by} after {duration(result.seconds)}{saved}"
    tries = f", attempt {len(result.attempts)}" if len(result.attempts) > 1 else ""
    return f"finished in {duration(result.seconds)}, {counted(workers, 'worker')}{tries}"
