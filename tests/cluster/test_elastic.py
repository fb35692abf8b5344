"""Machines that come and go: the others restart from the last checkpoint, and who returns joins."""

import json
import re
import signal
from pathlib import Path

from tests.cluster.lab import Lab, finish
from tests.cluster.slurm_lab import wait_until

ELASTIC = (
    *("--distributed-type", "MULTI_CPU", "--nproc-per-node", "1", "--nnodes", "2:3", "--max-restarts", "1"),
    *("--machine-timeout-seconds", "3", "--rdzv-conf", "last_call_timeout=3", "--shutdown-grace-seconds", "3"),
    *("--main-process-ip", "host0", "saves.py"),
)


def test_host_whose_link_is_cut_is_dropped_and_one_that_returns_joins(three: Lab, folder: Path):
    state = folder / "state.json"

    def saved() -> dict:
        return json.loads(state.read_text()) if state.exists() else {"step": 0, "world": 0}

    def start(machine: int):
        return three.launch(machine, *ELASTIC, cwd=folder, STATE=str(state), EVERY="1")

    runs = [start(machine) for machine in range(3)]
    try:
        wait_until(lambda: saved()["world"] == 3, 60)
        three.cut(2)
        wait_until(lambda: saved()["world"] == 2, 60)
        at_loss = saved()["step"]
        code, _, err = finish(runs.pop())
        assert code == 3
        assert "lost machine 0 at host0:29500: no word for 3 s" in err
        three.mend(2)
        runs.append(start(2))
        wait_until(lambda: saved()["world"] == 3, 60)
        assert saved()["step"] >= at_loss > 1
        runs[0].send_signal(signal.SIGTERM)
        ends = [finish(run) for run in runs]
    finally:
        three.mend(2)
        for run in runs:
            if run.poll() is None:
                run.kill()
    assert [code for code, _, _ in ends] == [75, 75, 75], ends
    out, err = ends[0][1:]
    starts = [line for line in out.splitlines() if line.startswith("start at step")]
    assert [line.rpartition(" ")[2] for line in starts] == ["3", "2", "3"]
    assert starts[0] == "start at step 0 of world 3"
    assert "start at step 0 of world 2" not in starts
    assert f"lost host2 ({three.address(2)}): no word for 3 s; 2 machines go on from the last checkpoint" in err
    joined = rf"host2 \({re.escape(three.address(2))}\) joins as machine [12]: all workers start again"
    assert re.search(joined, err), err  # its number is that of the order they came in
