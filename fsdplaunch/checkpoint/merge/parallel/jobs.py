"""Processes that do one phase of a merge together: forked, so that each has the plan; when one fails, all end."""

import json
import os
import selectors
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from fsdplaunch.checkpoint.merge.options import MergeProgress, ProgressMeter
from fsdplaunch.errors import CheckpointError
from fsdplaunch.parent_death import die_with_parent

Share = TypeVar("Share")
_READ = 65536
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_jobs(shares: Sequence[Share], work: Callable[[Share, ProgressMeter], None], meter: ProgressMeter) -> None:
    """Work on each share in a process of its own; with one share, in this one.

    Args:
        shares: What there is to do.
        work: Does one share, telling the given meter.
        meter: Shows what all of them have done.

    Raises:
        CheckpointError: From the first process that failed, or one was killed; the others are ended.
        OSError: The same.
    """
    if len(shares) == 1:
        work(shares[0], meter)
        return
    jobs: list[_Job] = []
    try:
        with _signals_held():
            for share in shares:
                jobs.append(_Job(share, work, meter))  # noqa: PERF401  (those begun are ended when one cannot be)
        _follow(jobs, meter)
    finally:
        for job in jobs:
            job.end()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Have signals that end this process wait: one between a fork and its notice would lose the child.

    One in a child's first moment would have it do what the parent does then: end the others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Job:
    """One process and what it tells."""

    def __init__(self, share: Any, work: Callable[[Any, ProgressMeter], None], meter: ProgressMeter) -> None:
        self.pipe, theirs = os.pipe()
        self.done, self.is_finished, self._rest = 0, False, b""
        parent = os.getpid()
        try:
            with warnings.catch_warnings():
                # Other threads may draw a progress bar: the child does not touch what they do.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
        except OSError:  # no more processes
            os.close(self.pipe)
            os.close(theirs)
            raise
        if self.pid == 0:
            _run_and_exit(share, work, ProgressMeter(meter.phase, 0, _teller(theirs)), theirs, parent)
        os.close(theirs)

    def read(self) -> list[dict[str, Any]] | None:
        """Return the messages that it has sent since; None at its end."""
        data = os.read(self.pipe, _READ)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Kill it, if it runs still: what it has written goes with the folder."""
        os.close(self.pipe)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _follow(jobs: Sequence[_Job], meter: ProgressMeter) -> None:
    with selectors.DefaultSelector() as selector:
        for job in jobs:
            selector.register(job.pipe, selectors.EVENT_READ, job)
        while selector.get_map():
            for key, _ in selector.select():
                messages = key.data.read()
                if messages is None:
                    selector.unregister(key.fileobj)
                    _check_end(key.data)
                for message in messages or ():
                    _take(key.data, message, jobs, meter)


def _take(job: _Job, message: dict[str, Any], jobs: Sequence[_Job], meter: ProgressMeter) -> None:
    if "error" in message:
        _raise_again(message)
    job.is_finished = job.is_finished or "finished" in message
    job.done = message.get("done", job.done)
    meter.tensor = message.get("tensor", meter.tensor)
    meter.tick(sum(each.done for each in jobs) - meter.done)


def _check_end(job: _Job) -> None:
    if not job.is_finished:
        msg = f"process {job.pid} of this merge was killed"
        raise CheckpointError(msg, hint="look whether memory ran out (dmesg), or merge with fewer --jobs")


def _raise_again(message: dict[str, Any]) -> NoReturn:
    kind, text = message["error"], message["text"]
    if kind == "OSError":
        raise OSError(message["errno"], text, message["filename"])
    if kind == "MemoryError":
        raise MemoryError
    if kind == "CheckpointError":
        raise CheckpointError(text, hint=message["hint"])
    msg = f"{kind}: {text}"
    raise RuntimeError(msg)


def _run_and_exit(
    share: Any, work: Callable[[Any, ProgressMeter], None], meter: ProgressMeter, pipe: int, parent: int
) -> NoReturn:
    """Do the work of one process, and end it whatever happens."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it as well, and ends all
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        die_with_parent(signal.SIGKILL, parent=parent)
        work(share, meter)
        _tell(pipe, {"done": meter.done, "finished": True})
        status = 0
    except BaseException as problem:
        _tell(pipe, _described(problem))
    finally:
        os._exit(status)


def _described(problem: BaseException) -> dict[str, Any]:
    if isinstance(problem, CheckpointError):
        return {"error": "CheckpointError", "text": problem.message, "hint": problem.hint}
    if isinstance(problem, OSError):
        text = problem.strerror or str(problem)
        name = None if problem.filename is None else str(problem.filename)
        return {"error": "OSError", "text": text, "errno": problem.errno, "filename": name}
    return {"error": type(problem).__name__, "text": str(problem)}


def _teller(pipe: int) -> Callable[[MergeProgress], None]:
    return lambda now: _tell(pipe, {"done": now.done, "tensor": now.tensor})


def _tell(pipe: int, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(pipe, data) :]
