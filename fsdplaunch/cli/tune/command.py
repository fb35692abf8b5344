"""`fsdplaunch tune`: measure which configuration is fastest here, with the user's own script, and write it."""

import signal
import time

from fsdplaunch.cli.launch.single_node import check_script, short_path
from fsdplaunch.cli.output import Output
from fsdplaunch.cli.tune.job import TuneJob
from fsdplaunch.cli.tune.progress import SearchProgress
from fsdplaunch.cli.tune.report import TuneOutputs, check_outputs, report
from fsdplaunch.cli.tune.request import TuneRequest, resumed
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import EXIT_FAILED, LaunchError, UsageError
from fsdplaunch.tune.candidate import Candidate
from fsdplaunch.tune.outcome import Outcome
from fsdplaunch.tune.result import TuneResult
from fsdplaunch.tune.rows import CannotMeasureError, SearchStopped
from fsdplaunch.tune.search import Search
from fsdplaunch.tune.space import Space
from fsdplaunch.tune.state import TuneState, find_state

INTERRUPTED = 130


def tune(request: TuneRequest, *, resume: str | None, outputs: TuneOutputs, out: Output) -> int:
    """Measure candidates until the fastest that fits is known, and say and write it.

    Returns:
        0 when one was found; 1 when none fits or none can be measured; 130 after Ctrl-C.

    Raises:
        LaunchError: Before anything was started.
    """
    check_outputs(outputs)
    state = find_state(resume, request.log_dir()) if resume is not None else None
    if state is not None:
        request = resumed(state, request)
    if request.script is None:
        msg = "no script given"
        raise UsageError(msg, hint="fsdplaunch tune train.py [its own arguments]")
    if not request.module:
        check_script(request.script)
    job = TuneJob.prepared(request, out)
    kept = {**request.to_dict(), "base": job.fingerprint}
    state = state or TuneState(folder=job.new_folder(), request=kept)
    if state.request.get("base") != job.fingerprint:
        msg = f"{job.file_words} is not what it was when this search began"
        raise UsageError(msg, hint="start again without --resume, or put it back")
    return _search(job, state, outputs, out)


def _search(job: TuneJob, state: TuneState, outputs: TuneOutputs, out: Output) -> int:
    """Search, report, and return the exit status."""
    search, progress = _prepared(job, state, out)
    began, kept, status = time.monotonic(), None, 0
    try:
        with progress.shown():
            kept = search.run()
    except (SearchStopped, KeyboardInterrupt) as stopped:
        kept, status = search.best(), _status(stopped)
    except CannotMeasureError as error:
        out.error(_cannot(error, job, state))
        return EXIT_FAILED
    result = TuneResult(
        script=job.plan.script, config=job.file_words, folder=state.folder, world=job.plan.workers,
        device=job.plan.device, limit=search.predictor.limit, rows=tuple(search.rows.values()), kept=kept,
        duels=tuple(search.duels), is_complete=not status, seconds=time.monotonic() - began,
    )  # fmt: skip
    report(result, _config_of(search.space, kept) if kept is not None else None, job.loaded, outputs, out)
    if status:
        out.say(f"stopped; to go on: fsdplaunch tune --resume {short_path(state.folder)}")
    return status or (0 if kept is not None else EXIT_FAILED)


def _prepared(job: TuneJob, state: TuneState, out: Output) -> tuple[Search, SearchProgress]:
    """Return the search, which launches what is not known yet, and what shows it."""
    space, runner = job.space(), job.runner(state.folder)
    _announce(job, state, out)

    def launch(candidate: Candidate, number: int, steps: int) -> Outcome:
        with progress.launching(candidate, number, steps):
            return runner.run(_config_of(space, candidate), number, steps)

    trial = state.trial(launch)
    search = Search(space=space, predictor=job.predictor(), steps=job.request.steps, trial=trial)
    progress = SearchProgress(search, state.folder, out)
    search.changed = progress.changed
    return search, progress


def _status(stopped: BaseException) -> int:
    """Return the exit status of a search that a signal has stopped."""
    name = str(stopped).rpartition(" ")[2]
    return 128 + int(signal.Signals[name]) if name in signal.Signals.__members__ else INTERRUPTED


def _announce(job: TuneJob, state: TuneState, out: Output) -> None:
    place = "GPUs" if job.plan.device == "cuda" else "the CPU"
    out.say(f"tune {job.plan.script} with {job.file_words} on {job.plan.workers} workers ({place})")
    out.say(f"  every trial and its output: {short_path(state.folder)}, Ctrl-C keeps what is known")
    if job.request.allow_writes:
        out.note("--allow-writes: what the script writes to other folders than its own is written by every trial")
    else:
        out.say("  the script runs in a copy of this folder made of links: what it writes there is thrown away,")
        out.say("  a write elsewhere is refused; programs that it starts itself are not kept from writing")
    for note in job.plan.notes:
        out.note(note)
    if state.outcomes:
        count = len(state.outcomes)
        out.say(f"  going on after {count} launch{'es' if count != 1 else ''}")


def _cannot(error: CannotMeasureError, job: TuneJob, state: TuneState) -> LaunchError:
    words = str(error)
    if "may write to" in words:
        hint = "give the script a folder below this one, as a relative path; or --allow-writes"
        return LaunchError(f"{job.plan.script}: {words}", hint=hint)
    hint = (
        f"the output of this launch is in {short_path(state.folder)}/trials/001; fsdplaunch check tries a script"
    )
    return LaunchError(f"{job.plan.script} fails with the configuration as it is: {words}", hint=hint)


def _config_of(space: Space, candidate: Candidate) -> Config:
    """Return the configuration of a candidate that is measured: the rules have taken it."""
    config = space.config(candidate)
    if config is None:
        msg = f"the rules refuse {candidate.label}"
        raise LaunchError(msg)
    return config
