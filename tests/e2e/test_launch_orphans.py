"""No process outlives its launcher, however that one ends."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fsdplaunch.agent.fork_client import CLOSE_SECONDS
from fsdplaunch.parent_death import ORPHAN_SECONDS
from scripts.campaigns.attack_classes.stores import descendants
from tests.e2e.conftest import WARM, alive, gone_within

COLD = True
"""Which process is whose child is another thing where the agent is forked."""
SCRIPT = """
import os, subprocess, sys, time
rank = os.environ['RANK']
child = subprocess.Popen(['sleep', '300'])
daemon = "setsid sh -c 'sleep 300 >&- & echo $!'"  # its parents end at once, and it has a session of its own
daemon = subprocess.run(daemon + " 2>&-", shell=True, stdout=subprocess.PIPE).stdout.decode().strip()
open(f'up{rank}', 'w').write(f'{os.getpid()} {os.getppid()} {child.pid} {daemon}')
time.sleep(300)
"""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


CODES = {
    "launcher": -9,
    "agent": 137,
    "fork server": 137,
    "agent, cold": 137,
    "launcher of a stopped agent": -9,
    "launcher and fork server of a stopped agent": -9,
    "agent of a stopped fork server": 137,
}


def kill(start, _folder, case):
    victim = case.removesuffix(", cold")
    run = start(SCRIPT, "--launch.preload", "torch" if victim == case else "none")
    words = [run.wait_for(f"up{rank}").split() for rank in range(2)]
    workers, fork_server = [int(word[0]) for word in words], int(words[0][1])
    children = [int(pid) for word in words for pid in word[2:]]
    agent = parent_of(fork_server)
    assert WARM or parent_of(agent) == run.pid
    pids = {"launcher": run.pid, "agent": agent, "fork server": fork_server}
    dead, _, stopped = victim.partition(" of a stopped ")
    if stopped:
        os.kill(pids[stopped], signal.SIGSTOP)
    if victim == "launcher of a stopped agent":  # what a worker leaves behind is the agent's to end otherwise
        os.kill(workers[0], signal.SIGKILL)
        assert gone_within(workers[:1], 5) == []
    for each in reversed(dead.split(" and ")):  # the launcher last
        os.kill(pids[each], signal.SIGKILL)
    if victim == "launcher of a stopped agent":  # as one that is stuck in C, it is not to be woken
        for _ in range(50):
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGSTOP)
            time.sleep(0.01)
    assert gone_within([run.pid, agent, fork_server, *workers], CLOSE_SECONDS + ORPHAN_SECONDS + 5) == []
    left = gone_within(children, 2)
    for child in left:
        os.kill(child, signal.SIGKILL)
    assert left == []
    return run.end()


@pytest.fixture(scope="module")
def killed(side_by_side):
    return side_by_side(kill, {case: (case,) for case in CODES})


@pytest.mark.parametrize("case", CODES)
def test_no_process_outlives_a_killed(killed, case):
    assert killed[case].result() == CODES[case]


def test_agent_that_is_stuck_while_it_imports_torch_does_not_outlive_a_killed_launcher(start):
    run = start(SCRIPT)
    while (
        len(family := descendants(run.pid)) < 2 or b"agent" not in Path(f"/proc/{family[1]}/cmdline").read_bytes()
    ):
        assert run.process.poll() is None  # until the fork has become the agent
    os.kill(family[1], signal.SIGSTOP)
    os.kill(run.pid, signal.SIGKILL)
    is_gone = gone_within(family, 10) == []
    for left in filter(alive, family):
        os.kill(left, signal.SIGKILL)
    assert is_gone
    assert run.end() == -9


def test_failed_rank_takes_what_it_started_with_it(start):
    run = start(SCRIPT.replace("time.sleep(300)", "sys.exit(5 if rank == '1' else time.sleep(300))"))
    words = [run.wait_for(f"up{rank}").split() for rank in range(2)]
    assert run.end() == 5
    ended = [(word[0], word[2]) if WARM else word[:3] for word in words]  # the fork server may stay
    assert gone_within([int(pid) for word in ended for pid in word], 2) == []
    end_daemons(words)


def end_daemons(words):
    """What left a worker's group is left alone where nobody has stopped the run."""
    for daemon in [int(word[3]) for word in words]:
        assert alive(daemon)
        os.kill(daemon, signal.SIGKILL)


def test_run_that_ends_well_leaves_what_it_started_and_one_that_is_stopped_does_not(start):
    run = start(SCRIPT.replace("time.sleep(300)", "pass"))
    words = [run.wait_for(f"up{rank}").split() for rank in range(2)]
    assert run.end() == 0
    for child in [int(word[2]) for word in words]:
        assert alive(child)
        os.kill(child, signal.SIGKILL)
    end_daemons(words)
    for rank in range(2):
        (run.folder / f"up{rank}").unlink()
    run = start(SCRIPT)
    words = [run.wait_for(f"up{rank}").split() for rank in range(2)]
    run.signal(signal.SIGTERM)
    run.end()
    assert gone_within([int(pid) for word in words for pid in word[2:]], 2) == []
