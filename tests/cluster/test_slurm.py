"""A real SLURM: inside an allocation, submitted, followed, cancelled, warned, requeued after a failure."""

import json
import shlex
import sys
from pathlib import Path

from tests.cluster.lab import campaign
from tests.cluster.slurm_lab import Slurm, wait_until

PLAIN = ("--distributed-type", "MULTI_CPU", "--nproc-per-node", "1", "--use-cpu")
ALL = (*PLAIN, "--show-ranks", "all")
ODD = ["a b", "$(touch evaluated)", 'it\'s "quoted"', "two\nlines", "`id`", "$HOME", "\\", "*", "--x=1;2"]


def submit(slurm: Slurm, folder: Path, *words: str, **env: str) -> tuple[str, Path]:
    """Submit a run; return the job's number and the run's folder."""
    done = slurm.fsdplaunch("launch", "--slurm", "--json", *words, cwd=folder, **env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return told["job"], Path(told["run_dir"])


def output(run_dir: Path) -> str:
    return "".join(path.read_text() for path in sorted(run_dir.glob("slurm-*.out")))


def result(part: Path) -> dict:
    return json.loads((part / "result.json").read_text())


def test_batch_script_without_srun_starts_a_launcher_on_every_machine(slurm: Slurm, folder: Path):
    command = shlex.join([sys.executable, "-P", "-m", "fsdplaunch", "launch", *ALL, "sum.py", *ODD])
    (folder / "job.sh").write_text(f"#!/bin/bash\n#SBATCH -N2\n#SBATCH -o out.txt\n{command}\n")
    job = slurm.run("sbatch", "--parsable", "job.sh", cwd=folder).stdout.strip()
    slurm.wait_for_end(job, about=(folder / "out.txt").read_text)
    said = (folder / "out.txt").read_text()
    assert f"rank 0 of 2 on host0 sum 3.0 {ODD!r}" in said
    assert f"rank 1 of 2 on host1 sum 3.0 {ODD!r}" in said
    assert not (folder / "evaluated").exists()


def test_submitted_run_is_followed_to_its_end_with_its_arguments_unchanged(slurm: Slurm, folder: Path):
    odd = folder / "a 'folder' $(touch evaluated)"
    odd.mkdir()
    script = odd / "my script.py"
    script.write_text((folder / "sum.py").read_text())
    words = ["--slurm", "--follow", *ALL, "--num-machines", "2", "--set", "slurm.time=5", str(script), *ODD]
    done = slurm.fsdplaunch("launch", *words, cwd=odd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rank 1 of 2 on host1 sum 3.0 {ODD!r}" in done.stdout
    assert not list(folder.rglob("evaluated"))
    listed = slurm.fsdplaunch("runs", "--json", cwd=odd)
    (run,) = json.loads(listed.stdout)
    assert (run["route"], run["state"], run["unfinished"]) == ("slurm", "done", False)
    logs = slurm.fsdplaunch("runs", "logs", run["run_id"][-4:], "--rank", "1", cwd=odd)
    assert "rank 1 of 2" in logs.stdout


def test_run_that_fails_gives_its_own_code_and_report(slurm: Slurm, folder: Path):
    words = ["--slurm", "--follow", *PLAIN, "--num-machines", "2", "sum.py"]
    done = slurm.fsdplaunch("launch", *words, cwd=folder, FAIL="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ValueError: no such luck" in done.stdout
    assert "on host1" in done.stdout
    assert "failed (1)" in done.stderr


def test_warned_run_saves_goes_back_into_the_queue_goes_on_and_can_be_cancelled(slurm: Slurm, folder: Path):
    state = folder / "state"
    words = (*PLAIN, "--num-machines", "2", "saves.py")
    job, run_dir = submit(slurm, folder, *words, STATE=str(state))
    wait_until(lambda: "start at step 0 of world 2" in output(run_dir), 60, lambda: output(run_dir))
    slurm.run("scancel", "--batch", "--signal=USR1", job, cwd=folder)  # as --signal=B:USR1@120 does
    wait_until(lambda: "back into the queue" in output(run_dir), 30, lambda: output(run_dir))
    step = json.loads(state.read_text())["step"]
    assert f"saved at step {step}\n" in output(run_dir)
    assert result(run_dir / "try0")["exit_code"] == 75
    again = f"start at step {step} of world 2"
    wait_until(lambda: again in output(run_dir), 60, lambda: output(run_dir) + slurm.logs())
    cancelled = slurm.fsdplaunch("runs", "cancel", "latest", cwd=folder)
    assert cancelled.returncode == 0, cancelled.stderr
    wait_until(lambda: slurm.job_state(job) == "CANCELLED", 30, slurm.logs)
    cancelled = slurm.fsdplaunch("runs", "cancel", "latest", cwd=folder)
    assert cancelled.returncode == 2
    assert "is not running: cancelled" in cancelled.stderr
    assert output(run_dir).count("back into the queue") == 1  # and not after it was cancelled


@campaign
def test_warning_comes_from_slurm_ahead_of_the_time_limit(slurm: Slurm, folder: Path):
    state = folder / "state"
    limit = ("--slurm.time", "1", "--slurm.signal-seconds", "20")  # it may come half a minute earlier
    job, run_dir = submit(slurm, folder, *PLAIN, "--num-machines", "2", *limit, "saves.py", STATE=str(state))
    wait_until(lambda: "back into the queue" in output(run_dir), 60, lambda: output(run_dir) + slurm.logs())
    assert f"SLURM announces the end of job {job}: asking the workers to save" in output(run_dir)
    again = f"start at step {json.loads(state.read_text())['step']} of world 2"
    wait_until(lambda: again in output(run_dir), 60, lambda: output(run_dir) + slurm.logs())
    slurm.run("scancel", job, cwd=folder)


TRAINS = (
    *("--use-cpu", "--nproc-per-node", "1", "--num-machines", "2", "--machine-timeout-seconds", "3"),
    *("--fsdp-auto-wrap-policy", "NO_WRAP", "trains.py"),
)


def test_machine_that_dies_puts_the_run_back_and_it_resumes_from_its_last_checkpoint(slurm: Slurm, folder: Path):
    host0, host1, host2 = (f"host{number} ({slurm.lab.address(number)})" for number in range(3))
    job, run_dir = submit(slurm, folder, *TRAINS, STEPS="41")
    about = lambda: output(run_dir) + slurm.logs()  # noqa: E731
    wait_until((folder / "checkpoints" / "checkpoint-10").exists, 60, about)
    slurm.lab.kill(1)
    try:
        wait_until((run_dir / "try0" / "lost").exists, 30, about)
        last = max(int(path.name.partition("-")[2]) for path in (folder / "checkpoints").glob("checkpoint-*"))
        slurm.wait_for_end(job, about=about)
    finally:
        slurm.start_machine(1)
    first, second = (output(run_dir).partition(f"-try{number}  ")[2] for number in (0, 1))
    assert f"error: lost {host1}: its launcher is gone" in first
    assert f"nodes {host0}, {host2}\n" in second
    assert (folder / "starts").read_text() == f"0 2 0\n{last} 2 0\n"  # with the weights of the checkpoint
    assert [result(run_dir / part)["exit_code"] for part in ("try0", "try1")] == [3, 0]


@campaign
def test_workers_of_a_machine_whose_slurmd_died_end_before_the_run_goes_on(slurm: Slurm, folder: Path):
    state = folder / "state"
    words = (*PLAIN, "--num-machines", "2", "--machine-timeout-seconds", "3", "saves.py")
    job, run_dir = submit(slurm, folder, *words, STATE=str(state), EVERY="1", STEPS="400")
    wait_until(state.exists, 60, lambda: output(run_dir))
    slurm.kill_daemon(1)
    try:
        wait_until(lambda: slurm.job_state(job) == "PENDING", 60, slurm.logs)
        wait_until(lambda: not slurm.launchers(1), 4, lambda: output(run_dir))
        wait_until(lambda: output(run_dir).count("start at step") == 2, 60, lambda: output(run_dir) + slurm.logs())
    finally:
        slurm.start_machine(1)
        slurm.run("scancel", job, cwd=folder)
    begun = [line for line in output(run_dir).splitlines() if line.startswith("start at step")]
    assert begun[0] == "start at step 0 of world 2"
    assert int(begun[1].split()[3]) > 20


def test_array_is_one_run_whose_tasks_are_warned_one_by_one_and_cancelled(slurm: Slurm, folder: Path):
    words = (*PLAIN, "--num-machines", "2", "--slurm.array", "0-1", "saves.py")
    job, run_dir = submit(slurm, folder, *words, STATE=str(folder / "state"), EVERY="1")
    about = lambda: output(run_dir) + slurm.logs()  # noqa: E731
    wait_until(lambda: (folder / "state0").exists() and (folder / "state1").exists(), 60, about)
    listed = slurm.fsdplaunch("runs", cwd=folder).stdout.splitlines()[1:]
    (words,) = (line.split() for line in listed)
    assert (words[0], *words[-5:]) == (run_dir.name, "2", "running,", "job", job, "saves.py")
    slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_1", cwd=folder)  # its number is also the array's
    wait_until(lambda: slurm.job_state(f"{job}_1") == "PENDING", 30, about)
    assert f"the end of job {job}_1: asking the workers to save" in output(run_dir)
    assert result(run_dir / "task1" / "try0")["exit_code"] == 75
    assert slurm.job_state(f"{job}_0") == "RUNNING"
    assert slurm.fsdplaunch("runs", "cancel", run_dir.name, cwd=folder).returncode == 0
    wait_until(lambda: slurm.job_state(f"{job}_0") == slurm.job_state(f"{job}_1") == "CANCELLED", 30, about)


@campaign
def test_preempted_run_saves_waits_and_goes_on(slurm: Slurm, folder: Path):
    state = folder / "state.json"
    words = (*PLAIN, "--num-machines", "3", "--slurm.partition", "low", "saves.py")
    job, run_dir = submit(slurm, folder, *words, STATE=str(state), EVERY="1", STEPS="60")
    wait_until(state.exists, 60, lambda: output(run_dir))
    slurm.run("sbatch", "-N3", "--exclusive", "-p", "high", "-o", "/dev/null", "--wrap", "sleep 2", cwd=folder)
    wait_until(lambda: "back into the queue" in output(run_dir), 60, lambda: output(run_dir) + slurm.logs())
    slurm.wait_for_end(job, about=lambda: output(run_dir))
    assert "done at step 60" in output(run_dir)
