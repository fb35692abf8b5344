"""`fsdplaunch tune`: measure which configuration is fastest here, with the user's own script, and write it."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fsdplaunch.cli.output import LINE_SECONDS, Output
from fsdplaunch.cli.single_node import check_script, pass_checks, plan_for_this_node, short_path
from fsdplaunch.config.load import LoadedConfig, load_config, stack
from fsdplaunch.config.render import write_text_atomically
from fsdplaunch.config.resolve import node_range, uses_xla
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.errors import EXIT_FAILED, LaunchError, UsageError
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget
from fsdplaunch.probe.hardware import read_hardware
from fsdplaunch.run_dir import fresh_run_id, rank_folder, write_json
from fsdplaunch.step_record import read_steps
from fsdplaunch.tune.result import TuneResult, step_words, table_lines, winner_text
from fsdplaunch.tune.search import CannotMeasureError, Search, SearchStopped
from fsdplaunch.tune.space import Candidate, Space, read_tries
from fsdplaunch.tune.trial import WARM_UP, Outcome, TrialRunner

INTERRUPTED = 130
_RESULT = "tune.json"


def tune(
    *,
    out: Output,
    script: str | None,
    arguments: tuple[str, ...] = (),
    module: bool = False,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    tries: Sequence[str] = (),
    steps: int = 10,
    limit_seconds: float = 300.0,
    memory: int | None = None,
    precision: bool = False,
    compile: bool = False,  # noqa: A002  (as the option has it)
    allow_writes: bool = False,
    write: Path | None = None,
    overwrite: bool = False,
    as_json: bool = False,
) -> int:
    """Measure candidates until the fastest that fits is known, and say and write it; see the command's options.

    Returns 0 when one was found, 1 when none fits or none can be measured, 130 after Ctrl-C.
    """
    _check_file(write, overwrite=overwrite)
    name, values = check_script(script, "tune", is_file=not module), read_tries(tries)
    loaded = load_config(file, overrides=overrides)
    _check_config(loaded.config)
    hardware = read_hardware(os.environ)
    target = LaunchTarget(name=name, arguments=arguments, is_module=module)
    plan = plan_for_this_node(loaded, hardware, target, allow_unsharded=False)
    if status := pass_checks(plan, hardware, out, as_json=False):
        return status
    data = loaded.path.read_bytes() if loaded.path else b""

    def read(further: Sequence[str]) -> Config:
        text = read_text(data, str(loaded.path or "defaults"))
        return stack(text, path=loaded.path, environ=os.environ, overrides=(*overrides, *further)).config

    on_gpu = plan.device == "cuda"
    allowed = frozenset(name for name, on in (("precision", precision), ("compile", compile)) if on)
    space = Space(read=read, world=plan.workers, on_gpu=on_gpu, allowed=allowed, tries=values)
    if values and not space.singles():
        msg = "--try names no value that would change the run"
        hint = "the values are already set, contradict other keys, or have no effect"
        raise UsageError(msg, hint=hint)
    folder = Path(loaded.config.launch.log_dir).absolute() / f"{fresh_run_id()}-tune"
    source = str(loaded.path) if loaded.path else "the built-in configuration"
    _announce(plan, source, folder, out, allow_writes=allow_writes)

    def plan_trial(config: Config, target: LaunchTarget, place: Path) -> LaunchPlan:
        changed = replace(loaded, config=config, notes=())
        run_id = f"{folder.name}-{place.name}"
        return plan_for_this_node(changed, hardware, target, allow_unsharded=False, run_id=run_id, folder=place)

    runner = TrialRunner(
        plan=plan_trial, target=target, folder=folder, source=Path.cwd(), limit_seconds=limit_seconds,
        guarded=not allow_writes,
    )  # fmt: skip
    limit = memory or (hardware.gpu_memory_bytes if on_gpu else None)
    search = Search(space=space, limit=limit, steps=steps, trial=_trial(space, runner, out))
    began, kept, status = time.monotonic(), None, 0
    try:
        kept = search.run()
    except (SearchStopped, KeyboardInterrupt) as stopped:
        number = signal.Signals.__members__.get(str(stopped).rpartition(" ")[2])
        kept, status = search.best(), INTERRUPTED if number is None else 128 + int(number)
    except CannotMeasureError as error:
        out.error(_cannot(str(error), plan.script, folder))
        return EXIT_FAILED
    result = TuneResult(
        script=plan.script, config=source, folder=folder, world=plan.workers, device=plan.device, limit=limit,
        rows=tuple(search.rows.values()), kept=kept, duels=tuple(search.duels), is_complete=not status,
        seconds=time.monotonic() - began,
    )  # fmt: skip
    write_json(folder / _RESULT, result.to_dict())
    if as_json:
        out.json(result.to_dict())
    else:
        out.data("\n".join(table_lines(result)))
    if write is not None:
        _write(write, result, space, loaded, out)
    return status or (0 if kept is not None else EXIT_FAILED)


def _check_file(path: Path | None, *, overwrite: bool) -> None:
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        msg = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise UsageError(msg, hint="name a file in a folder that exists")
    if path.exists() and not overwrite:
        msg = f"{path} exists"
        raise UsageError(msg, hint="--overwrite replaces it, --write FILE writes another one")


def _check_config(config: Config) -> None:
    if uses_xla(config):
        msg = "tune searches configurations of torch's FSDP, and this one is PyTorch/XLA's"
        raise UsageError(msg, hint="leave xla out, or launch without tune")
    if config.distributed_type != "FSDP":
        msg = f"distributed_type {config.distributed_type} shards nothing: there is nothing to tune"
        raise UsageError(msg, hint="set distributed_type: FSDP")
    if (nodes := node_range(config)[1]) > 1:
        msg = f"the configuration is for {nodes} nodes, and tune measures on this one"
        raise UsageError(msg, hint="for this node alone: --set num_machines=1 --set num_processes=auto")


def _announce(plan: LaunchPlan, source: str, folder: Path, out: Output, *, allow_writes: bool) -> None:
    place = "GPUs" if plan.device == "cuda" else "the CPU"
    out.say(f"tune {plan.script} with {source} on {plan.workers} workers ({place})")
    out.say(f"  every trial and its output: {short_path(folder)}, Ctrl-C keeps what is known")
    if allow_writes:
        out.note("--allow-writes: what the script writes to other folders than its own is written by every trial")
    else:
        out.say("  the script runs in a copy of this folder made of links: what it writes there is thrown away,")
        out.say("  a write elsewhere is refused; programs that it starts can write anywhere")
    for note in plan.notes:
        out.note(note)


def _trial(space: Space, runner: TrialRunner, out: Output) -> Callable[[Candidate, int], Outcome]:
    """Return what launches candidates one after the other, and says how far each is and what came of it."""
    numbers = itertools.count(1)

    def trial(candidate: Candidate, steps: int) -> Outcome:
        number, config = next(numbers), space.config(candidate)
        if config is None:
            msg = f"the rules refuse {candidate.label}"
            raise LaunchError(msg)
        ended, began = threading.Event(), time.monotonic()
        ranks = rank_folder(runner.folder / "trials" / f"{number:03d}", 0)

        def follow() -> None:
            while not ended.wait(LINE_SECONDS):
                record, seconds = read_steps(ranks, only_head=True), time.monotonic() - began
                made = record.made if record is not None else 0
                out.say(f"  {candidate.label}: step {made} of {steps + WARM_UP}, {seconds:.0f} s")

        threading.Thread(target=follow, daemon=True).start()
        try:
            outcome = runner.run(config, number, steps)
        finally:
            ended.set()
        if outcome.kind == "stopped":
            raise SearchStopped(outcome.failure)
        failed = f"failed: {outcome.failure}"
        out.say(f"  {candidate.label}: {failed if outcome.failure else f'{step_words(outcome)} per step'}")
        return outcome

    return trial


def _cannot(words: str, script: str, folder: Path) -> LaunchError:
    if "may write to" in words:
        hint = "give the script a folder below this one, as a relative path; or --allow-writes"
        return LaunchError(f"{script}: {words}", hint=hint)
    hint = f"the output of this launch is in {short_path(folder)}/trials/001; fsdplaunch check tries a script"
    return LaunchError(f"{script} fails with the configuration as it is: {words}", hint=hint)


def _write(path: Path, result: TuneResult, space: Space, loaded: LoadedConfig, out: Output) -> None:
    config = space.config(result.kept) if result.kept is not None else None
    if config is None:
        out.note(f"{path} is not written: there is no candidate to write")
        return
    write_text_atomically(path, winner_text(result, config, loaded))
    same = result.kept is not None and result.kept.is_yours
    out.say(f"wrote {path}" + (": your configuration, unchanged" if same else ""))
