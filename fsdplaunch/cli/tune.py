"""`fsdplaunch tune`: measure which configuration is fastest here, with the user's own script, and write it."""

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli.output import LINE_SECONDS, Output
from fsdplaunch.cli.single_node import (
    check_script,
    pass_checks,
    plan_for_this_node,
    short_path,
)
from fsdplaunch.config.load import LoadedConfig, load_config, stack
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import write_text_atomically
from fsdplaunch.config.resolve import node_range, uses_xla
from fsdplaunch.config.schema.config import Config, KeySpec, keys_by_path, value_at
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.display_text import printable
from fsdplaunch.errors import EXIT_FAILED, LaunchError, UsageError
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget
from fsdplaunch.probe.hardware import Hardware, read_hardware
from fsdplaunch.run_dir import fresh_run_id, rank_folder, read_heartbeat
from fsdplaunch.tune.result import (
    SUFFIX,
    TuneResult,
    TuneState,
    broken_state,
    closing_lines,
    find_state,
    step_words,
    table_lines,
    winner_text,
)
from fsdplaunch.tune.search import CannotMeasureError, Row, Search, SearchStopped
from fsdplaunch.tune.space import Candidate, Space, identity, read_tries
from fsdplaunch.tune.trial import WARM_UP, Outcome, TrialRunner

STEPS, LIMIT_SECONDS = 10, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What is to be searched; kept with the search, which goes on with it.

    Attributes:
        script: Its path, or a module's name.
        arguments: Its own.
        module: Whether the script is a module.
        file: The configuration; None for the one that a launch would take.
        overrides: `KEY=VALUE` from the command line.
        tries: `KEY=V1,V2` from the command line.
        steps: Measured in a first launch.
        limit_seconds: How long one launch may take.
        memory: Bytes that a rank may need; None for the GPUs' own.
        precision: Whether other dtypes may be tried.
        compile: Whether torch.compile is tried.
        allow_writes: Whether the script may write outside of its folder.
    """

    script: str | None = None
    arguments: tuple[str, ...] = ()
    module: bool = False
    file: str | None = None
    overrides: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()
    steps: int = STEPS
    limit_seconds: float = LIMIT_SECONDS
    memory: int | None = None
    precision: bool = False
    compile: bool = False
    allow_writes: bool = False

    @property
    def path(self) -> Path | None:
        """Return the configuration's file; None for the one that a launch would take."""
        return Path(self.file) if self.file else None

    def log_dir(self) -> Path:
        """Return where the configuration says that runs are."""
        return Path(load_config(self.path, overrides=self.overrides).config.launch.log_dir)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, with the folder it belongs to."""
        return {**asdict(self), "folder": str(Path.cwd())}


def resumed(state: TuneState, request: TuneRequest) -> TuneRequest:
    """Return what a search was asked.

    Args:
        state: What it has kept.
        request: What is asked now: nothing else but where runs are.

    Raises:
        UsageError: More is asked, the search belongs to another folder, or its file is broken.
    """
    if request != TuneRequest(file=request.file, overrides=request.overrides):
        msg = "--resume goes on with its own script and options"
        raise UsageError(msg, hint="give only --write, --json or --overwrite beside it")
    try:
        kept = {name: state.request[name] for name in TuneRequest.__dataclass_fields__}
        lists = {name: tuple(kept[name]) for name in ("arguments", "overrides", "tries")}
        folder = state.request["folder"]
    except (KeyError, TypeError) as error:
        raise broken_state(state.folder) from error
    if folder != str(Path.cwd()):
        msg = f"the search began in {folder}"
        raise UsageError(msg, hint=f"cd {folder}")
    return TuneRequest(**{**kept, **lists})


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """A search that may begin: everything is read and checked.

    Attributes:
        request: What is searched.
        loaded: The user's configuration.
        hardware: This machine.
        target: The script.
        plan: Of a launch with the user's configuration.
        tries: Values from the command line, by key.
    """

    request: TuneRequest
    loaded: LoadedConfig
    hardware: Hardware
    target: LaunchTarget
    plan: LaunchPlan
    tries: Mapping[tuple[str, ...], Sequence[Any]]

    @classmethod
    def prepared(cls, request: TuneRequest, out: Output) -> "TuneJob":
        """Read and check everything.

        Raises:
            LaunchError: The search cannot begin.
        """
        tries = read_tries(request.tries)
        loaded = load_config(request.path, overrides=request.overrides)
        _check_config(loaded.config)
        hardware = read_hardware(os.environ)
        script = request.script or ""
        target = LaunchTarget(name=script, arguments=request.arguments, is_module=request.module)
        plan = plan_for_this_node(loaded, hardware, target, allow_unsharded=False)
        if status := pass_checks(plan, hardware, out, as_json=False):
            raise SystemExit(status)
        return cls(request=request, loaded=loaded, hardware=hardware, target=target, plan=plan, tries=tries)

    @property
    def file_words(self) -> str:
        """Return the configuration's file, in words."""
        return str(self.loaded.path) if self.loaded.path else "the built-in configuration"

    @property
    def fingerprint(self) -> str:
        """Return a hash of the configuration, to compare with when a search began; no value shows in it."""
        return hashlib.sha256(repr(identity(self.loaded.config, self.plan.workers)).encode()).hexdigest()

    def new_folder(self) -> Path:
        """Return the folder of a new search."""
        return Path(self.loaded.config.launch.log_dir).absolute() / f"{fresh_run_id()}{SUFFIX}"

    def space(self) -> Space:
        """Return what may be tried.

        Raises:
            UsageError: `--try` names nothing that makes another run.
        """
        loaded, request = self.loaded, self.request
        data = loaded.path.read_bytes() if loaded.path else b""

        def read(overrides: Sequence[str]) -> Config:
            text = read_text(data, str(loaded.path or "defaults"))
            every = (*request.overrides, *overrides)
            return stack(text, path=loaded.path, environ=os.environ, overrides=every).config

        allowed = {
            name for name, wanted in (("precision", request.precision), ("compile", request.compile)) if wanted
        }
        on_gpu = self.plan.device == "cuda"
        space = Space(
            read=read, world=self.plan.workers, on_gpu=on_gpu, allowed=frozenset(allowed), tries=self.tries
        )
        if self.tries and not space.singles():
            msg = "--try names nothing that makes another run than yours"
            raise UsageError(
                msg, hint="the values may be those that are set, contradict other keys, or have no effect"
            )
        return space

    @property
    def limit(self) -> int | None:
        """Return the bytes that a rank may need; None where nothing limits it."""
        on_gpu = self.plan.device == "cuda"
        return self.request.memory or (self.hardware.gpu_memory_bytes if on_gpu else None)

    def runner(self, folder: Path) -> TrialRunner:
        """Return what launches trials into a search's folder."""

        def plan(config: Config, target: LaunchTarget, place: Path) -> LaunchPlan:
            loaded = replace(self.loaded, config=config, notes=())
            return plan_for_this_node(
                loaded,
                self.hardware,
                target,
                allow_unsharded=False,
                run_id=f"{folder.name}-{place.name}",
                folder=place,
            )

        return TrialRunner(
            plan=plan, target=self.target, folder=folder, source=Path.cwd(),
            limit_seconds=self.request.limit_seconds, guarded=not self.request.allow_writes,
        )  # fmt: skip


def _check_config(config: Config) -> None:
    """Refuse what cannot be measured here.

    Raises:
        UsageError: The configuration shards nothing, or by PyTorch/XLA, or is for several nodes.
    """
    if uses_xla(config):
        msg = "tune searches configurations of torch's FSDP, and this one is PyTorch/XLA's"
        raise UsageError(msg, hint="leave xla out, or launch without tune")
    if config.distributed_type != "FSDP":
        msg = f"distributed_type {config.distributed_type} shards nothing: there is nothing to tune"
        raise UsageError(msg, hint="set distributed_type: FSDP")
    if node_range(config)[1] > 1:
        msg = f"the configuration is for {node_range(config)[1]} nodes, and tune measures on this one"
        raise UsageError(msg, hint="for this node alone: --set num_machines=1 --set num_processes=auto")


class SearchProgress:
    """Shows a search.

    Args:
        search: Whose rows are shown.
        folder: Of its trials.
        out: Where to.
    """

    def __init__(self, search: Search, folder: Path, out: Output) -> None:
        self._search, self._folder, self._out = search, folder, out
        self._live = sys.stderr.isatty() and not out.quiet
        self._at: tuple[int, int, float] | None = None
        self._told: set[tuple[Candidate, int]] = set()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the table until the block ends, on a terminal."""
        if not self._live:
            yield
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        def table() -> Text:
            return Text("\n".join(map(printable, self._lines())), no_wrap=True, overflow="ellipsis")

        with Live(get_renderable=table, console=Console(stderr=True), transient=True, refresh_per_second=4):
            yield

    def changed(self) -> None:
        """Say what has become of each launch, once, where there is no table."""
        if self._live:
            return
        for row in list(self._search.rows.values()):
            key = (row.candidate, len(row.outcomes))
            if key not in self._told and row.state not in ("waiting", "running", "slower", "as fast"):
                self._told.add(key)
                self._out.say(f"  {row.candidate.label}: {_words(row)}")

    @contextmanager
    def launching(self, candidate: Candidate, number: int, steps: int) -> Iterator[None]:
        """Follow one launch; every ten seconds a line where there is no table."""
        self._at = (number, steps + WARM_UP, time.monotonic())
        ended = threading.Event()
        follower = threading.Thread(target=self._follow, args=(candidate, ended), daemon=True)
        if not self._live:
            follower.start()
        try:
            yield
        finally:
            ended.set()
            self._at = None

    def _follow(self, candidate: Candidate, ended: threading.Event) -> None:
        while not ended.wait(LINE_SECONDS):
            self._out.say(f"  {candidate.label}: {self._now()}")

    def _lines(self) -> list[str]:
        rows = list(self._search.rows.values())
        return table_lines(rows, limit=self._search.limit, progress=self._now())

    def _now(self) -> str:
        """Return how far the running launch is."""
        if self._at is None:
            return ""
        number, steps, began = self._at
        beat = read_heartbeat(rank_folder(self._folder / "trials" / f"{number:03d}", 0))
        made = beat.steps if beat is not None else 0
        return f"step {made} of {steps}, {time.monotonic() - began:.0f} s"


def _words(row: Row) -> str:
    """Return what has become of a candidate, and of its last launch."""
    last = row.outcomes[-1] if row.outcomes else None
    if row.state == "measured" and last is not None:
        low, high = last.quartiles
        return f"{step_words(last.median)} per step ({step_words(low)} to {step_words(high)})"
    return row.reason if row.state == "same run" else f"{row.state}: {row.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOutputs:
    """What is to be written, beside the table.

    Attributes:
        write: The winner as a configuration.
        overwrite: Whether files that exist may be replaced.
        as_json: One JSON object on stdout instead of the table.
    """

    write: Path | None = None
    overwrite: bool = False
    as_json: bool = False


def _check_outputs(outputs: TuneOutputs) -> None:
    """Refuse a file that exists, or whose folder does not, before anything is measured."""
    if outputs.write is not None and outputs.write.exists() and not outputs.overwrite:
        msg = f"{outputs.write} exists"
        raise UsageError(msg, hint="--overwrite replaces it, --write FILE writes another one")
    path = outputs.write
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        msg = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise UsageError(msg, hint="name a file in a folder that exists")


def report(
    result: TuneResult, config: Config | None, loaded: LoadedConfig, outputs: TuneOutputs, out: Output
) -> None:
    """Print and write what a search came to.

    Args:
        result: The end of the search.
        config: Of the kept candidate; None when there is none.
        loaded: The user's configuration.
        outputs: What is to be written.
        out: Where words go.
    """
    if outputs.as_json:
        out.json(result.to_dict())
    else:
        for line in table_lines(result.rows, limit=result.limit, kept=result.kept):
            out.data(line)
        out.data("")
        for line in closing_lines(result):
            out.data(line)
    if outputs.write is not None and config is None:
        out.note(f"{outputs.write} is not written: there is no candidate to write")
    elif outputs.write is not None and config is not None:
        write_text_atomically(outputs.write, _text(result, config, loaded))
        out.say(f"wrote {outputs.write}")


def _text(result: TuneResult, config: Config, loaded: LoadedConfig) -> str:
    """Return the winner's file: the user's own changed, or a new one where that would say something else."""
    if loaded.path is not None:
        old = loaded.path.read_bytes().decode("utf-8")
        edited = winner_text(result, config, old=old, changes=_changes(result, config, loaded))
        try:
            if stack(read_text(edited, str(loaded.path))).config == config:
                return edited
        except ConfigError:
            pass
    return winner_text(result, config, old=None, changes=())


def _changes(result: TuneResult, config: Config, loaded: LoadedConfig) -> list[tuple[KeySpec, Any]]:
    """Return what has to change in the user's file: the candidate's keys, what follows them, what options set."""
    keys = keys_by_path()
    changed = dict(result.kept.changes) if result.kept is not None else {}
    follow = [
        tuple(name.split("."))
        for path in changed
        if (tunable := keys[path].key.tunable) is not None
        for name in tunable.follow
    ]
    given = [path for path, origin in loaded.origins.items() if origin.layer in ("env", "flag")]
    paths = [path for path in dict.fromkeys([*given, *follow]) if path not in changed]
    configured = {path for path in paths if loaded.origins[path].layer != "default"}
    return [(keys[path], value_at(config, path)) for path in (*changed, *configured)]


INTERRUPTED = 130


def tune_command(
    *,
    file: Path | None,
    resume: str | None,
    write: Path | None,
    overwrite: bool,
    as_json: bool,
    out: Output,
    **asked: Any,
) -> int:
    """Search as the command line says; `asked` is what `TuneRequest` has."""
    request = TuneRequest(**asked, file=str(file) if file is not None else None)
    outputs = TuneOutputs(write=write, overwrite=overwrite, as_json=as_json)
    return tune(request, resume=resume, outputs=outputs, out=out)


def tune(request: TuneRequest, *, resume: str | None, outputs: TuneOutputs, out: Output) -> int:
    """Measure candidates until the fastest that fits is known, and say and write it.

    Returns:
        0 when one was found; 1 when none fits or none can be measured; 130 after Ctrl-C.

    Raises:
        LaunchError: Before anything was started.
    """
    _check_outputs(outputs)
    state = find_state(resume, request.log_dir()) if resume is not None else None
    if state is not None:
        request = resumed(state, request)
    check_script(request.script, "tune", is_file=not request.module)
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
        device=job.plan.device, limit=search.limit, rows=tuple(search.rows.values()), kept=kept,
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
    search = Search(space=space, limit=job.limit, steps=job.request.steps, trial=trial)
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
