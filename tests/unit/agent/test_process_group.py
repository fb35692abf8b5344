"""Ending a worker, in every moment of its life."""

import os
import signal
import subprocess
import sys

from fsdplaunch.agent.fork_server import kill_group, kill_worker

_LEADS = "import os, subprocess; os.setsid(); subprocess.Popen(['sleep', '60']); print(flush=True); os.wait()"


def test_a_worker_that_leads_no_group_yet_is_killed():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    kill_worker(pid)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    kill_group(pid)  # says nothing where there is none


def test_what_a_worker_started_is_killed_with_it():
    with subprocess.Popen([sys.executable, "-c", _LEADS], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"\n"
        kill_worker(worker.pid)
        assert worker.stdout.read() == b""  # sleep had it open, too
    assert worker.returncode == -signal.SIGKILL
