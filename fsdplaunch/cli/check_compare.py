"""`fsdplaunch check --compare`: the script in one process and over two CPU workers, and what they computed."""

import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fsdplaunch.cli.comparison_report import as_data, as_lines
from fsdplaunch.cli.output import Output
from fsdplaunch.config.environment import COMPARE_CHANGED, COMPARE_DIR, REHEARSAL_STEPS
from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.launch.comparison.causes import find_cause
from fsdplaunch.launch.comparison.records import RunFacts, read_run
from fsdplaunch.launch.comparison.rounding import is_equal, may_be_rounding, rounding
from fsdplaunch.launch.comparison.saved_weights import saved_since
from fsdplaunch.launch.comparison.verdict import added_up, compare
from fsdplaunch.launch.entry_points import PLAIN_RUN
from fsdplaunch.launch.plan import LaunchPlan
from fsdplaunch.parent_death import ended_with_us
from fsdplaunch.run_dir import COMPARED_CHANGED

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
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_plain(plan: LaunchPlan, out: Output) -> None:
    """Run the script in one process, as plain python does, and record it.

    Raises:
        LaunchError: It failed, or made no step.
    """
    target = plan.target
    out.say(f"  first {target.name} in one process, then over {plan.workers} workers")
    began = time.time()
    status = _run_alone(plan, {})
    if status:
        msg = f"{target.name} failed in one process, with exit code {status}: there is nothing to compare with"
        again = shlex.join(["python", *(["-m"] if target.is_module else []), target.name])
        hint = f"run {again} until it works; its output is above"
        raise LaunchError(msg, hint=hint)
    if read_run(Path(plan.env[COMPARE_DIR]), 0) is None:
        raise no_step(plan, workers=1)
    saved = saved_since(Path.cwd(), began)
    if saved is not None:
        out.say(f"  it saved {saved}: a script that resumes from what it finds does so in the next run")
        out.say(
            "  then give it an output folder that is new in every run, or fewer --steps than come before a save"
        )


def _run_changed(plan: LaunchPlan, out: Output) -> RunFacts | None:
    """Run the script once more in one process, from weights changed in their last digits; None if it failed."""
    out.say("  they part: once more in one process, with weights changed in their last digits, to tell rounding")
    status = _run_alone(plan, {COMPARE_CHANGED: "1"})
    return None if status else read_run(Path(plan.env[COMPARE_DIR]), 0, COMPARED_CHANGED)


def _run_alone(plan: LaunchPlan, further: Mapping[str, str]) -> int:
    """Run the script in one process, record it, and return its exit status."""
    target = plan.target
    command = [
        sys.executable,
        "-m",
        PLAIN_RUN,
        *(("-m",) if target.is_module else ()),
        target.name,
        *target.arguments,
    ]
    return subprocess.run(
        command,
        env={**_plain_environ(plan, os.environ), **further},
        stdout=sys.stderr,
        check=False,
        preexec_fn=ended_with_us(),
    ).returncode


def no_step(plan: LaunchPlan, *, workers: int) -> LaunchError:
    """Return the error for a run that trained nothing."""
    where = "in one process" if workers == 1 else f"over {workers} workers"
    msg = f"{plan.script}, {where}, ended without an optimizer step"
    return LaunchError(msg, hint="give it arguments with which it trains; --steps only ends it earlier")


def _plain_environ(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    own = {
        name: value for name, value in environ.items() if not name.startswith(_OURS) and name not in _OF_A_WORKER
    }
    passed = {
        name: plan.env[name]
        for name in (COMPARE_DIR, REHEARSAL_STEPS, "OMP_NUM_THREADS", "PYTHONHASHSEED")
        if name in plan.env
    }
    return {**own, **plan.config.launch.env, **passed, "CUDA_VISIBLE_DEVICES": ""}


def conclude(plan: LaunchPlan, tolerance: float, *, as_json: bool, out: Output) -> int:
    """Compare both records, say what came of it, and return the exit status.

    Raises:
        LaunchError: The workers made no step.
    """
    folder = Path(plan.env[COMPARE_DIR])
    plain, sharded = read_run(folder, 0), read_run(folder, plan.workers)
    if plain is None or sharded is None:
        raise no_step(plan, workers=plan.workers)
    sharded = added_up(plain, sharded, tolerance)
    verdict = compare(plain, sharded, tolerance)
    dtype = plan.config.precision.param
    cause = find_cause(verdict.first, plain, sharded, dtype) if verdict.first else None
    if cause is not None and verdict.first is not None and may_be_rounding(verdict.first, cause):
        changed = _run_changed(plan, out)
        cause = (changed and rounding(verdict.first, plain, sharded, changed)) or cause
    if as_json:
        out.json(as_data(plan, plain, sharded, verdict, cause, tolerance))
    else:
        for line in as_lines(plan, plain, sharded, verdict, cause):
            out.data(line)
    return EXIT_EQUAL if is_equal(verdict, cause) else EXIT_DIFFERENT


def check_tolerance(tolerance: float) -> None:
    """Refuse a tolerance that nothing or everything meets.

    Raises:
        UsageError: It is not above 0 and finite.
    """
    if not (math.isfinite(tolerance) and tolerance > 0):
        msg = f"--tolerance must be a number above 0, got {tolerance}"
        raise UsageError(msg, hint="1e-4 is the default")
