"""`fsdplaunch tune`: measure which configuration is fastest here, with the user's own script, and write it."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli.launch.options import LaunchOptions
from fsdplaunch.cli.launch.single_node import check_script, pass_checks, plan_for_this_node, short_path
from fsdplaunch.cli.output import Output
from fsdplaunch.cli.tune_progress import SearchProgress
from fsdplaunch.cli.tune_report import TuneOutputs, check_outputs, report
from fsdplaunch.config.load.load import LoadedConfig, load_config, stack
from fsdplaunch.config.load.yaml_reader import read_text
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.world_size import node_range
from fsdplaunch.errors import EXIT_FAILED, LaunchError, UsageError
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget
from fsdplaunch.launch.run_id import fresh_run_id
from fsdplaunch.probe.hardware import Hardware, read_hardware
from fsdplaunch.probe.torch_version import installed_numbers
from fsdplaunch.tune.candidate import Candidate
from fsdplaunch.tune.outcome import Outcome
from fsdplaunch.tune.predict import Predictor
from fsdplaunch.tune.result import TuneResult
from fsdplaunch.tune.search import CannotMeasureError, Search, SearchStopped
from fsdplaunch.tune.space import Space, identity
from fsdplaunch.tune.state import SUFFIX, TuneState, broken_state, find_state
from fsdplaunch.tune.trial import TrialRunner
from fsdplaunch.tune.tries import read_tries

INTERRUPTED = 130
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


def tune(request: TuneRequest, *, resume: str | None, outputs: TuneOutputs, out: Output) -> int:
    """Measure candidates until the fastest that fits is known, and say and write it.

    Returns:
        0 when one was found; 1 when none fits or none can be measured; 130 after Ctrl-C.

    Raises:
        LaunchError: Before anything was started.
    """
    check_outputs(outputs)
    state = find_state(resume, _log_dir(request)) if resume is not None else None
    if state is not None:
        request = _resumed(state, request)
    if request.script is None:
        msg = "no script given"
        raise UsageError(msg, hint="fsdplaunch tune train.py [its own arguments]")
    if not request.module:
        check_script(request.script)
    job = TuneJob.prepared(request, out)
    state = state or TuneState(folder=job.new_folder(), request=_as_data(request, job))
    if state.outcomes and state.request["base"] != _fingerprint(job):
        msg = f"{job.file_words} is not what it was when this search began"
        raise UsageError(msg, hint="start again without --resume, or put it back")
    return job.search(state, outputs, out)


def _log_dir(request: TuneRequest) -> Path:
    loaded = load_config(Path(request.file) if request.file else None, overrides=request.overrides)
    return Path(loaded.config.launch.log_dir)


def _resumed(state: TuneState, request: TuneRequest) -> TuneRequest:
    """Return what a search was asked, which nothing else may be asked beside."""
    if request != TuneRequest(file=request.file, overrides=request.overrides):
        msg = "--resume goes on with its own script and options"
        raise UsageError(msg, hint="give only --write, --html, --json or --overwrite beside it")
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


def _as_data(request: TuneRequest, job: "TuneJob") -> dict[str, Any]:
    return {**asdict(request), "base": _fingerprint(job), "folder": str(Path.cwd())}


def _fingerprint(job: "TuneJob") -> list[str]:
    return list(identity(job.loaded.config, job.plan.workers))


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
        file = Path(request.file) if request.file else None
        loaded = load_config(file, overrides=request.overrides, torch=installed_numbers)
        _check_config(loaded.config)
        hardware = read_hardware(os.environ)
        target = LaunchTarget(
            name=request.script or "", arguments=request.arguments, is_module=request.module
        )  # fmt: skip
        plan = plan_for_this_node(loaded, hardware, target, allow_unsharded=False)
        if status := pass_checks(plan, hardware, LaunchOptions(), out):
            raise SystemExit(status)
        return cls(request=request, loaded=loaded, hardware=hardware, target=target, plan=plan, tries=tries)

    @property
    def file_words(self) -> str:
        """Return the configuration's file, in words."""
        return str(self.loaded.path) if self.loaded.path else "the built-in configuration"

    def new_folder(self) -> Path:
        """Return the folder of a new search."""
        return Path(self.loaded.config.launch.log_dir).absolute() / f"{fresh_run_id()}{SUFFIX}"

    def search(self, state: TuneState, outputs: TuneOutputs, out: Output) -> int:
        """Search, report, and return the exit status."""
        space, predictor = self._space(), self._predictor()
        _announce(self, state, out)
        runner = self._runner(state.folder)
        search = Search(space=space, predictor=predictor, steps=self.request.steps, trial=_never)
        progress = SearchProgress(search, state.folder, out)

        def launch(candidate: Candidate, number: int, steps: int) -> Outcome:
            with progress.launching(candidate, number, steps):
                return runner.run(_config_of(space, candidate), number, steps)

        search.trial, search.changed = state.trial(launch), progress.changed
        began, kept, status = time.monotonic(), None, 0
        try:
            with progress.shown():
                kept = search.run()
        except (SearchStopped, KeyboardInterrupt):
            kept, status = search.best(), INTERRUPTED
        except CannotMeasureError as error:
            out.error(_cannot(error, self, state))
            return EXIT_FAILED
        result = self._result(search, state, kept, complete=not status, seconds=time.monotonic() - began)
        config = _config_of(space, kept) if kept is not None else None
        report(result, config, self.loaded, outputs, out)
        if status:
            out.say(f"stopped; to go on: fsdplaunch tune --resume {short_path(state.folder)}")
        return status or (0 if kept is not None else EXIT_FAILED)

    def _result(
        self, search: Search, state: TuneState, kept: Candidate | None, *, complete: bool, seconds: float
    ) -> TuneResult:
        return TuneResult(
            script=self.plan.script, config=self.file_words, folder=state.folder, world=self.plan.workers,
            device=self.plan.device, limit=search.predictor.limit, rows=tuple(search.rows.values()), kept=kept,
            duels=tuple(search.duels), is_complete=complete, seconds=seconds,
        )  # fmt: skip

    def _space(self) -> Space:
        loaded, request = self.loaded, self.request
        data = loaded.path.read_bytes() if loaded.path else b""

        def read(overrides: Sequence[str]) -> Config:
            text = read_text(data, str(loaded.path or "defaults"))
            every = (*request.overrides, *overrides)
            return stack(
                text, path=loaded.path, environ=os.environ, overrides=every, torch=installed_numbers
            ).config

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

    def _predictor(self) -> Predictor:
        on_gpu = self.plan.device == "cuda"
        limit = self.request.memory or (self.hardware.gpu_memory_bytes if on_gpu else None)
        return Predictor(world=self.plan.workers, on_gpu=on_gpu, limit=limit)

    def _runner(self, folder: Path) -> TrialRunner:
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
        UsageError: The configuration shards nothing, or is for several nodes.
    """
    if config.distributed_type != "FSDP":
        msg = f"distributed_type {config.distributed_type} shards nothing: there is nothing to tune"
        raise UsageError(msg, hint="set distributed_type: FSDP")
    if node_range(config)[1] > 1:
        msg = f"the configuration is for {node_range(config)[1]} nodes, and tune measures on this one"
        raise UsageError(msg, hint="for this node alone: --set num_machines=1 --set num_processes=auto")


def _announce(job: TuneJob, state: TuneState, out: Output) -> None:
    place = "GPUs" if job.plan.device == "cuda" else "the CPU"
    out.say(f"tune {job.plan.script} with {job.file_words} on {job.plan.workers} workers ({place})")
    out.say(f"  every trial and its output: {short_path(state.folder)}, Ctrl-C keeps what is known")
    if job.request.allow_writes:
        out.note("--allow-writes: what the script writes to other folders than its own is written by every trial")
    else:
        out.say("  the script runs in a copy of this folder made of links: what it writes there is thrown away,")
        out.say("  a write elsewhere is refused; programs that it starts itself are not kept from writing")
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
    config = space.config(candidate)
    if config is None:
        msg = f"the rules refuse {candidate.label}"
        raise LaunchError(msg)
    return config


def _never(_candidate: Candidate, _steps: int) -> Outcome:
    raise NotImplementedError
