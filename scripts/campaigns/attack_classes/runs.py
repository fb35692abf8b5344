"""Start real runs for attacks on them; none outlives the campaign, however that ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fsdplaunch.launch.coordination.network import listen
from fsdplaunch.parent_death import ended_with_us

ROOT = Path(__file__).parents[3]
Run = subprocess.Popen


def launch(
    folder: Path,
    script: str,
    *options: str,
    wrapper: Sequence[str] = (),
    prepare: Callable[[], object] = lambda: None,
    **variables: str,
) -> "subprocess.Popen[str]":
    """Start `fsdplaunch launch OPTIONS train.py` in a folder; its output is thrown away, its messages are kept.

    `wrapper` is a command that executes the launcher, `prepare` is called in the process that becomes it.
    """
    place = folder / "train.py"
    if not place.exists() or place.read_text() != script:  # another run, started beside this one, may read it
        place.write_text(script)
    words = [*wrapper, sys.executable, "-P", "-m", "fsdplaunch", "launch", "--cpu", *options, "train.py"]
    return subprocess.Popen(
        words,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**environ(), **variables},
        start_new_session=True,
        preexec_fn=_prepared(prepare),  # noqa: PLW1509  (no threads here)
    )


def _prepared(more: Callable[[], object]) -> Callable[[], None]:
    die = ended_with_us()

    def prepare() -> None:
        # A shell has what it starts in the background ignore Ctrl-C, and this campaign may be such a thing.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die()
        more()

    return prepare


def environ() -> Mapping[str, str]:
    """Return the variables for a run on the CPU."""
    own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "CI": "1"}
    return {**os.environ, **own}


def launch_two_nodes(
    folder: Path, script: str, secret: str, *options: str, **variables: str
) -> list["subprocess.Popen[str]"]:
    """Start a run on two nodes, both of them on this machine."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    words = ("--num-machines", "2", "--nproc-per-node", "1", "--main-process-ip", "127.0.0.1")
    words = (*words, "--main-process-port", str(port), *options)
    own = {**variables, "FSDPLAUNCH_SECRET": secret}
    return [launch(folder, script, *words, "--machine-rank", rank, **own) for rank in "01"]


def end_all(runs: list["subprocess.Popen[str]"], seconds: float) -> list[str]:
    """Wait for the ends of launchers, and return what they said; kill those that are late.

    Raises:
        AssertionError: One was late.
    """
    end, said, late = time.monotonic() + seconds, [], 0
    for run in runs:
        try:
            said.append(run.communicate(timeout=max(0.1, end - time.monotonic()))[1])
        except subprocess.TimeoutExpired:
            late += 1
            run.kill()
            said.append(run.communicate()[1])
    if late:
        msg = f"{late} launchers had not ended after {seconds:.0f} s: {[text[-700:] for text in said]}"
        raise AssertionError(msg)
    return said


def wait_for(condition: Callable[[], bool], runs: list["subprocess.Popen[str]"], seconds: float = 120) -> None:
    """Wait for something that a run does.

    Raises:
        AssertionError: The run ended, or it took too long.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end or any(run.poll() is not None for run in runs):
            said = end_all(runs, 0.5) if any(run.poll() is not None for run in runs) else ""
            msg = f"the run did not come up: {said}"
            raise AssertionError(msg)
        time.sleep(0.05)


def variables_of(pid: int) -> dict[str, str]:
    """Return the variables a process was started with, or has set; empty when it has gone."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
