"""Machines that come and go: the others restart from the last checkpoint, and who returns joins."""

import re
import signal
from pathlib import Path

from tests.cluster.lab import Lab, finish
from tests.cluster.slurm_lab import wait_until

ELASTIC = (
    *("--use-cpu", "--nproc-per-node", "1", "--nnodes", "2:3", "--max-restarts", "1"),
    *("--fsdp-auto-wrap-policy", "NO_WRAP", "--checkpoint.keep-last", "3"),
    *("--machine-timeout-seconds", "3", "--rdzv-conf", "last_call_timeout=3", "--shutdown-grace-seconds", "3"),
    *("--main-process-ip", "host0", "trains.py"),
)


def test_host_whose_link_is_cut_is_dropped_and_one_that_returns_joins(three: Lab, folder: Path):
    def start(machine: int):
        return three.launch(machine, "--machine-rank", str(machine), *ELASTIC, cwd=folder)

    def saved() -> int:
        whole = [path.parent.name for path in folder.glob("checkpoints/checkpoint-*/fsdplaunch.json")]
        return max((int(name.rpartition("-")[2]) for name in whole), default=0)

    def starts() -> list[list[int]]:
        file = folder / "starts"
        lines = file.read_text().splitlines() if file.exists() else []
        return [[int(word) for word in line.split()] for line in lines]

    def goes_on(world: int, count: int = 1) -> bool:
        """Whether that many machines have started, the last of so many starts, and saved what they trained."""
        return len(starts()) >= count and starts()[-1][1] == world and saved() > starts()[-1][0]

    runs = [start(machine) for machine in range(3)]
    try:
        wait_until(lambda: goes_on(3), 120)
        whole = len(starts())  # more than one where a machine was so late that torch began without it
        three.cut(2)
        at_cut = saved()
        wait_until(lambda: goes_on(2, whole + 1), 120)
        code, _, err = finish(runs.pop())
        assert code == 3
        assert "lost the coordinator at host0:29500: no message for 3 s" in err
        three.mend(2)
        runs.append(start(2))
        wait_until(lambda: goes_on(3, whole + 2), 120)
        runs[1].send_signal(signal.SIGTERM)  # `ip netns exec` and `unshare` have become the launcher
        ends = [finish(run) for run in runs]
    finally:
        three.mend(2)
        for run in runs:
            if run.poll() is None:
                run.kill()
    assert [code for code, _, _ in ends] == [75, 75, 75], "\n".join(err for _, _, err in ends)
    steps, worlds, wrong = zip(*starts()[whole - 1 :], strict=True)
    assert worlds == (3, 2, 3)
    assert (
        steps[0] < at_cut <= steps[1] <= at_cut + 5
    )  # without host2 no step was possible; a save may have been under way
    assert steps[1] < steps[2] <= saved()
    assert wrong == (0, 0, 0)  # weights that are not those of the step
    out, err = ends[0][1:]
    assert f"saved at step {saved()}" in out
    assert "stopped by SIGTERM" in err
    assert f"lost host2 ({three.address(2)}): no message for 3 s; 2 nodes resume from the last checkpoint" in err
    joined = rf"host2 \({re.escape(three.address(2))}\) joins as node 2: all workers restart"
    assert re.search(joined, err), err
