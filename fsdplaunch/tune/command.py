"""`fsdplaunch tune`: measure which configuration is fastest here, with the user's own script, and write it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli.output import LINE_SECONDS, Output
from fsdplaunch.cli.single_node import check_script, pass_checks, plan_for_this_node, short_path
from fsdplaunch.config.load import LoadedConfig, load_config, stack
from fsdplaunch.config.render import write_text_atomically
from fsdplaunch.config.resolve import node_range, uses_xla
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.errors import EXIT_FAILED, LaunchError, UsageError
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget
from fsdplaunch.probe.hardware import Hardware, read_hardware
from fsdplaunch.run_dir import PRIVATE_MODE, fresh_run_id, rank_folder, read_heartbeat, write_json
from fsdplaunch.tune.result import TuneResult, state_words, step_words, table_lines, winner_text
from fsdplaunch.tune.search import CannotMeasureError, Row, Search, SearchStopped
from fsdplaunch.tune.space import Candidate, Space, read_tries
from fsdplaunch.tune.trial import WARM_UP, Outcome, TrialRunner

INTERRUPTED = 130
_RESULT = "tune.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be searched.

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

    script: str | None
    arguments: tuple[str, ...] = ()
    module: bool = False
    file: Path | None = None
    overrides: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()
    steps: int = 10
    limit_seconds: float = 300.0
    memory: int | None = None
    precision: bool = False
    compile: bool = False
    allow_writes: bool = False


def tune(
    *, out: Output, write: Path | None = None, overwrite: bool = False, as_json: bool = False, **asked: Any
) -> int:
    """Measure candidates until the fastest that fits is known, and say and write it.

    Args:
        out: Where words go.
        write: The file for the best configuration.
        overwrite: Whether a file that exists may be replaced.
        as_json: One JSON object on stdout instead of the table.
        asked: What `Asked` has.

    Returns:
        0 when one was found; 1 when none fits or none can be measured; 130 after Ctrl-C.

    Raises:
        LaunchError: Before anything was started.
    """
    request = Asked(**asked)
    if write is not None:
        _check_file(write, overwrite=overwrite)
    script = check_script(request.script, "tune", is_file=not request.module)
    tries = read_tries(request.tries)
    loaded = load_config(request.file, overrides=request.overrides)
    _check_config(loaded.config)
    hardware = read_hardware(os.environ)
    target = LaunchTarget(name=script, arguments=request.arguments, is_module=request.module)
    plan = plan_for_this_node(loaded, hardware, target, allow_unsharded=False)
    if status := pass_checks(plan, hardware, out, as_json=False):
        return status
    space = _space(request, loaded, plan, tries)
    on_gpu = plan.device == "cuda"
    limit = request.memory or (hardware.gpu_memory_bytes if on_gpu else None)
    folder = Path(loaded.config.launch.log_dir).absolute() / f"{fresh_run_id()}-tune"
    file = str(loaded.path) if loaded.path else "the built-in configuration"
    _announce(request, plan, file, folder, out)
    runner = TrialRunner(
        plan=_planner(loaded, hardware, folder), target=target, folder=folder, source=Path.cwd(),
        limit_seconds=request.limit_seconds, guarded=not request.allow_writes,
    )  # fmt: skip
    search = Search(space=space, limit=limit, steps=request.steps, trial=_trial(space, runner, out))
    search.changed = _Progress(search, out).changed
    began, kept, status = time.monotonic(), None, 0
    try:
        kept = search.run()
    except (SearchStopped, KeyboardInterrupt) as stopped:
        name = str(stopped).rpartition(" ")[2]
        known = signal.Signals.__members__
        kept, status = search.best(), 128 + int(known[name]) if name in known else INTERRUPTED
    except CannotMeasureError as error:
        out.error(_cannot(str(error), plan.script, folder))
        return EXIT_FAILED
    result = TuneResult(
        script=plan.script, config=file, folder=folder, world=plan.workers, device=plan.device, limit=limit,
        rows=tuple(search.rows.values()), kept=kept, duels=tuple(search.duels), is_complete=not status,
        seconds=time.monotonic() - began,
    )  # fmt: skip
    write_json(folder / _RESULT, result.to_dict(), mode=PRIVATE_MODE)
    if as_json:
        out.json(result.to_dict())
    else:
        out.data("\n".join(table_lines(result)))
    if write is not None:
        _write(write, result, space, loaded, out)
    return status or (0 if kept is not None else EXIT_FAILED)


def _check_file(path: Path, *, overwrite: bool) -> None:
    """Refuse a file that exists, or whose folder does not, before anything is measured."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        msg = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise UsageError(msg, hint="name a file in a folder that exists")
    if path.exists() and not overwrite:
        msg = f"{path} exists"
        raise UsageError(msg, hint="--overwrite replaces it, --write FILE writes another one")


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
    if (nodes := node_range(config)[1]) > 1:
        msg = f"the configuration is for {nodes} nodes, and tune measures on this one"
        raise UsageError(msg, hint="for this node alone: --set num_machines=1 --set num_processes=auto")


def _space(
    request: Asked, loaded: LoadedConfig, plan: LaunchPlan, tries: Mapping[tuple[str, ...], Sequence[Any]]
) -> Space:
    """Return what may be tried.

    Raises:
        UsageError: `--try` names nothing that makes another run.
    """
    data = loaded.path.read_bytes() if loaded.path else b""

    def read(overrides: Sequence[str]) -> Config:
        text = read_text(data, str(loaded.path or "defaults"))
        every = (*request.overrides, *overrides)
        return stack(text, path=loaded.path, environ=os.environ, overrides=every).config

    allowed = frozenset(name for name in ("precision", "compile") if getattr(request, name))
    space = Space(read=read, world=plan.workers, on_gpu=plan.device == "cuda", allowed=allowed, tries=tries)
    if tries and not space.singles():
        msg = "--try names nothing that makes another run than yours"
        hint = "the values may be those that are set, contradict other keys, or have no effect"
        raise UsageError(msg, hint=hint)
    return space


def _planner(
    loaded: LoadedConfig, hardware: Hardware, folder: Path
) -> Callable[[Config, LaunchTarget, Path], LaunchPlan]:
    """Return what plans a trial's launch, as `fsdplaunch launch` does."""

    def plan(config: Config, target: LaunchTarget, place: Path) -> LaunchPlan:
        name = f"{folder.name}-{place.name}"
        changed = replace(loaded, config=config, notes=())
        return plan_for_this_node(changed, hardware, target, allow_unsharded=False, run_id=name, folder=place)

    return plan


def _trial(space: Space, runner: TrialRunner, out: Output) -> Callable[[Candidate, int], Outcome]:
    """Return what launches a candidate, for so many measured steps."""
    count = 0

    def trial(candidate: Candidate, steps: int) -> Outcome:
        nonlocal count
        count += 1
        config = space.config(candidate)
        if config is None:
            msg = f"the rules refuse {candidate.label}"
            raise LaunchError(msg)
        with _following(
            runner.folder, count, f"  {candidate.label}: step {{}} of {steps + WARM_UP}, {{:.0f}} s", out
        ):
            outcome = runner.run(config, count, steps)
        if outcome.kind == "stopped":
            raise SearchStopped(outcome.failure)
        return outcome

    return trial


@contextmanager
def _following(folder: Path, number: int, words: str, out: Output) -> Iterator[None]:
    """Say every ten seconds how far a launch is."""
    ended, began = threading.Event(), time.monotonic()

    def follow() -> None:
        while not ended.wait(LINE_SECONDS):
            beat = read_heartbeat(rank_folder(folder / "trials" / f"{number:03d}", 0))
            out.say(words.format(beat.steps if beat is not None else 0, time.monotonic() - began))

    threading.Thread(target=follow, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class _Progress:
    """Says what has become of each launch of a search, once."""

    def __init__(self, search: Search, out: Output) -> None:
        self._search, self._out = search, out
        self._said: set[tuple[Candidate, int]] = set()

    def changed(self) -> None:
        """Say what is new."""
        for row in self._search.rows.values():
            key = (row.candidate, len(row.outcomes))
            if key not in self._said and row.state not in ("waiting", "running", "slower", "as fast"):
                self._said.add(key)
                self._out.say(f"  {row.candidate.label}: {_words(row)}")


def _words(row: Row) -> str:
    return f"{step_words(row.outcomes[-1])} per step" if row.state == "measured" else state_words(row)


def _announce(request: Asked, plan: LaunchPlan, file: str, folder: Path, out: Output) -> None:
    place = "GPUs" if plan.device == "cuda" else "the CPU"
    out.say(f"tune {plan.script} with {file} on {plan.workers} workers ({place})")
    out.say(f"  every trial and its output: {short_path(folder)}, Ctrl-C keeps what is known")
    if request.allow_writes:
        out.note("--allow-writes: what the script writes to other folders than its own is written by every trial")
    else:
        out.say("  the script runs in a copy of this folder made of links: what it writes there is thrown away,")
        out.say("  a write elsewhere is refused; programs that it starts itself are not kept from writing")
    for note in plan.notes:
        out.note(note)


def _cannot(words: str, script: str, folder: Path) -> LaunchError:
    if "may write to" in words:
        hint = "give the script a folder below this one, as a relative path; or --allow-writes"
        return LaunchError(f"{script}: {words}", hint=hint)
    hint = f"the output of this launch is in {short_path(folder)}/trials/001; fsdplaunch check tries a script"
    return LaunchError(f"{script} fails with the configuration as it is: {words}", hint=hint)


def _write(path: Path, result: TuneResult, space: Space, loaded: LoadedConfig, out: Output) -> None:
    """Write the kept candidate as a configuration, and say so."""
    config = space.config(result.kept) if result.kept is not None else None
    if config is None:
        out.note(f"{path} is not written: there is no candidate to write")
        return
    write_text_atomically(path, winner_text(result, config, loaded))
    same = result.kept is not None and result.kept.is_yours
    out.say(f"wrote {path}" + (": your configuration, unchanged" if same else ""))
