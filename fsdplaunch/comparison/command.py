"""`fsdplaunch check --compare`: the script in one process and over two CPU workers, and what they computed."""

import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli.output import Output
from fsdplaunch.comparison.causes import Cause, find_cause, is_equal, may_be_rounding, rounding
from fsdplaunch.comparison.verdict import RunFacts, Verdict, added_up, compare, read_run
from fsdplaunch.config.environment import COMPARE_CHANGED, COMPARE_DIR, REHEARSAL_STEPS
from fsdplaunch.display_text import counted, table
from fsdplaunch.errors import LaunchError
from fsdplaunch.launch.entry_points import PLAIN_RUN
from fsdplaunch.launch.plan import LaunchPlan
from fsdplaunch.parent_death import ended_with_us
from fsdplaunch.run_dir import COMPARED_CHANGED, FOLDER_MODE

EXIT_EQUAL, EXIT_DIFFERENT = 0, 1
_OURS = ("FSDP", "ACCELERATE_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
_OF_A_WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def prepared(plan: LaunchPlan) -> LaunchPlan:
    """Return a plan whose workers record what they compute, beside the run's own folder."""
    folder = plan.run_dir.with_name(f".{plan.run_dir.name}-compare")
    return replace(plan, env={**plan.env, COMPARE_DIR: str(folder)})


@contextmanager
def recording(plan: LaunchPlan) -> Iterator[None]:
    """Make the folder of the records, and remove it at the end: it holds the model once."""
    folder = Path(plan.env[COMPARE_DIR])
    folder.mkdir(parents=True, mode=FOLDER_MODE)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_plain(plan: LaunchPlan, out: Output) -> None:
    """Run the script in one process, as plain python does, and record it."""
    target = plan.target
    out.say(f"  running {target.name} in one process, then over {plan.workers} workers")
    status = _run_alone(plan, {})
    if status:
        msg = f"{target.name} failed in one process, with exit code {status}: there is nothing to compare with"
        again = shlex.join(["python", *(["-m"] if target.is_module else []), target.name])
        raise LaunchError(msg, hint=f"run {again} until it works; its output is above")
    if read_run(Path(plan.env[COMPARE_DIR]), 0) is None:
        raise _no_step(plan, "in one process")


def _run_alone(plan: LaunchPlan, further: Mapping[str, str]) -> int:
    target = plan.target
    words = (*(("-m",) if target.is_module else ()), target.name, *target.arguments)
    theirs = [name for name in os.environ if not name.startswith(_OURS) and name not in _OF_A_WORKER]
    names = (COMPARE_DIR, REHEARSAL_STEPS, "OMP_NUM_THREADS", "PYTHONHASHSEED")
    # The plan is for the CPU, and hides all GPUs.
    passed = {name: text for name, text in plan.env.items() if name in names or name.endswith("_VISIBLE_DEVICES")}
    env = {name: os.environ[name] for name in theirs} | {**plan.config.launch.env, **passed}
    return subprocess.run(
        [sys.executable, "-m", PLAIN_RUN, *words], env={**env, **further},
        stdout=sys.stderr, check=False, preexec_fn=ended_with_us(),
    ).returncode  # fmt: skip


def _no_step(plan: LaunchPlan, where: str) -> LaunchError:
    msg = f"{plan.script}, {where}, ended without an optimizer step"
    return LaunchError(msg, hint="pass the script arguments with which it trains; --steps can only end it earlier")


def conclude(plan: LaunchPlan, tolerance: float, *, as_json: bool, out: Output) -> int:
    """Compare both records, say what came of it, and return the exit status."""
    folder = Path(plan.env[COMPARE_DIR])
    plain, sharded = read_run(folder, 0), read_run(folder, plan.workers)
    if plain is None or sharded is None:
        raise _no_step(plan, f"over {plan.workers} workers")
    sharded = added_up(plain, sharded, tolerance)
    verdict = compare(plain, sharded, tolerance)
    cause = find_cause(verdict.first, plain, sharded, plan.config.precision.param) if verdict.first else None
    if cause is not None and verdict.first is not None and may_be_rounding(verdict.first, cause):
        out.say("  they differ: running once more in one process, with the last digits of the weights changed,")
        out.say("  to see whether rounding alone makes as large a difference")
        status = _run_alone(plan, {COMPARE_CHANGED: "1"})
        changed = None if status else read_run(folder, 0, COMPARED_CHANGED)
        cause = (changed and rounding(verdict.first, plain, sharded, changed)) or cause
    if as_json:
        out.json(_as_data(plan, plain, sharded, verdict, cause) | {"tolerance": tolerance})
    else:
        for line in (*_table(plan, plain, sharded), "", *_words(plan, plain, verdict, cause)):
            out.data(line)
    return EXIT_EQUAL if is_equal(verdict, cause) else EXIT_DIFFERENT


def _table(plan: LaunchPlan, plain: RunFacts, sharded: RunFacts) -> list[str]:
    def shown(losses: tuple[float, ...]) -> str:
        return " ".join(f"{loss:.6g}" for loss in losses) or "none"

    many = f"{plan.workers} workers"
    rows = [("step", "loss, one process", f"loss, {many}", "gradient norm", many)]
    for number, (one, other) in enumerate(zip(plain.steps, sharded.steps, strict=False), start=1):
        norms = f"{one.norm:.6g}", f"{other.norm:.6g}"
        rows.append((str(number), shown(one.losses), shown(other.losses), *norms))
    return table(rows, str.rjust)


def _words(plan: LaunchPlan, plain: RunFacts, verdict: Verdict, cause: Cause | None) -> list[str]:
    if verdict.first is None or cause is None:
        steps, (count, by) = counted(len(plain.steps), "step"), verdict.parameters
        noise = (
            f"; {len(verdict.noise)} left out, whose gradients are only rounding errors" if verdict.noise else ""
        )
        return [
            f"equal: {plan.script} computes the same over {plan.workers} workers as in one process",
            f"  {steps}: losses and gradients to {verdict.largest:.1e}, {count} parameters to {by:.1e}{noise}",
        ]
    first = verdict.first
    place = {None: "after the last step", 0: "before the first step"}.get(first.step, f"at step {first.step}")
    values = ""
    if first.plain is not None:
        values = f", {first.plain:.6g} in one process and {first.sharded:.6g} over workers"
    word = "equal except for rounding, first visible" if is_equal(verdict, cause) else "different"
    return [
        f"{word} {place}: {first.what}{values} (they differ by {first.by:.1e})",
        f"  cause  {cause.text}",
        f"  try    {cause.hint}",
    ]


def _as_data(
    plan: LaunchPlan, plain: RunFacts, sharded: RunFacts, verdict: Verdict, cause: Cause | None
) -> dict[str, Any]:
    first = asdict(verdict.first) if verdict.first else {}
    rows = zip(plain.steps, sharded.steps, strict=False)
    return {
        "equal": is_equal(verdict, cause),
        "workers": plan.workers,
        "steps": [
            {"losses": [one.losses, many.losses], "gradient_norms": [one.norm, many.norm]} for one, many in rows
        ],
        "largest_difference": verdict.largest,
        "parameters": {"compared": verdict.parameters[0], "largest_difference": verdict.parameters[1]},
        "left_out": list(verdict.noise),
        # JSON has nothing for what is infinite.
        "first": {key: None if value == math.inf else value for key, value in first.items()} or None,
        "cause": asdict(cause) if cause else None,
        "run_dir": str(plan.run_dir),
    }
