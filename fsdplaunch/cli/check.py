"""`fsdplaunch check`: the user's script with its own configuration, on two CPU workers, for a few steps."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli import single_node
from fsdplaunch.cli.key_options import option_notes
from fsdplaunch.cli.output import Output
from fsdplaunch.config.environment import REHEARSAL_STEPS
from fsdplaunch.config.load import LoadedConfig, load_config
from fsdplaunch.display_text import counted, size_words
from fsdplaunch.errors import EXIT_FAILED, LaunchError
from fsdplaunch.features import COMPARISON, feature
from fsdplaunch.launch.compared import WORKERS, remember, shrunk
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget
from fsdplaunch.launch.run_result import RunResult
from fsdplaunch.probe.hardware import read_hardware
from fsdplaunch.run_dir import REHEARSAL, rank_folder
from fsdplaunch.step_record import read_steps


def check(
    script: str | None,
    arguments: tuple[str, ...],
    *,
    file: Path | None,
    overrides: Sequence[str],
    module: bool,
    as_json: bool,
    out: Output,
    steps: int | None = None,
    compare: bool = False,
    tolerance: float = 1e-4,
    noted: Sequence[str] = (),
) -> int:
    """Run the script for a few steps on two CPU workers and say whether the configuration works with it.

    The status is 0 when it works, or is equal; else the first failing rank's, or 1.
    """
    if not compare and arguments[:1] == ("--compare",):  # right after the script it is this command's as well
        compare, arguments = True, arguments[1:]
    script = single_node.check_script(script, "check", is_file=not module)
    comparison = feature(COMPARISON) if compare else None
    loaded = load_config(file, overrides=overrides, noted=option_notes(noted))
    asked = loaded.config
    small, changed = shrunk(asked)
    if compare:
        small = replace(small, launch=replace(small.launch, keep_global_batch=True))
    loaded = replace(loaded, config=small)
    hardware = replace(read_hardware(os.environ), gpus=(), notes=())
    target = LaunchTarget(name=script, arguments=arguments, is_module=module)
    plan = single_node.plan_for_this_node(loaded, hardware, target, allow_unsharded=False)
    rehearsed = {**plan.env, REHEARSAL_STEPS: str(steps or (5 if compare else 2))}
    plan = replace(plan, env=rehearsed, notes=(*plan.notes, *changed))
    plan = plan if comparison is None else comparison.prepared(plan)
    if status := single_node.pass_checks(plan, hardware, out, as_json=as_json):
        return status
    single_node.announce(plan, loaded, out)
    if comparison is None:
        return _conclude(
            single_node.run_shown(plan, as_json=as_json, out=out), plan, loaded, as_json=as_json, out=out
        )
    with comparison.recording(plan):
        comparison.run_plain(plan, out)
        result = single_node.run_shown(plan, as_json=True, out=out)  # the table is alone on stdout
        if result.failure is not None or result.stopped_by is not None:
            single_node.report(result, plan, as_json=False, out=out)
            return result.exit_code or EXIT_FAILED
        status = int(comparison.conclude(plan, tolerance, as_json=as_json, out=out))
    remember(asked, plan.target, equal=status == comparison.EXIT_EQUAL)
    return status


def test(script: str | None, arguments: tuple[str, ...], *, out: Output, **options: Any) -> int:
    """Try a script as `check` does, or without one the workers' connections."""
    if script is not None:
        return check(script, arguments, out=out, **options)
    from fsdplaunch.cli.doctor import doctor

    options.pop("module")
    return doctor(network=True, out=out, **options)


def _conclude(result: RunResult, plan: LaunchPlan, loaded: LoadedConfig, *, as_json: bool, out: Output) -> int:
    folders = [rank_folder(plan.run_dir, rank) for rank in range(WORKERS)]
    records = [json.loads(path.read_text()) for folder in folders if (path := folder / REHEARSAL).is_file()]
    is_complete, checkpoint = len(records) == WORKERS, None  # or the script ended before we did it
    if is_complete:
        steps, checkpoint = min(record["steps"] for record in records), records[0]["checkpoint"]
    else:
        counts = [read_steps(folder, only_head=True) for folder in folders]
        steps = min((count.made for count in counts if count is not None), default=0)
    works = result.failure is None and result.exit_code == 0 and steps > 0
    if as_json:
        found: dict[str, Any] = {"works": works, "steps": steps, "checkpoint_bytes": checkpoint}
        out.json({**found, "run_dir": str(plan.run_dir), **result.to_dict()})
    if result.failure is not None or result.stopped_by is not None:
        single_node.report(result, plan, as_json=False, out=out)
        return result.exit_code or EXIT_FAILED
    if not steps:
        msg = f"{plan.script} ended without an optimizer step"
        hint = "give it arguments with which it trains; --steps only ends it earlier"
        out.error(LaunchError(msg, hint=hint))
        return result.exit_code or EXIT_FAILED
    file = str(loaded.path) if loaded.path else "the built-in configuration"
    ended = "" if is_complete else ", then it ended by itself"
    out.say(f"{file} works with {plan.script}: {WORKERS} CPU workers, {counted(steps, 'step')}{ended}")
    if checkpoint is not None:
        out.say(f"  a checkpoint of {size_words(checkpoint)} was saved, read back and found equal")
    else:
        why = "another library shards the model and saves it its own way"
        out.say(f"  no checkpoint was tried: {why if is_complete else 'the script ended before --steps'}")
    return result.exit_code
