"""Machines over ssh, with real servers: all work, one refuses, hangs or dies; nothing outlives the client."""

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.cluster.lab import finish
from tests.cluster.programs import ALL_REDUCE
from tests.cluster.slurm_lab import wait_until
from tests.cluster.sshd_lab import Sshd

PLAIN = ("--distributed-type", "MULTI_CPU", "--nproc-per-node", "1", "--use-cpu")
ODD = ["a b", "$(touch evaluated)", 'it\'s "quoted"', "two\nlines", "`id`", "$HOME", "\\", "*", "--x=1;2"]


def launch(sshd: Sshd, folder: Path, hosts: str, *words: str, **env: str) -> "subprocess.Popen[str]":
    """Start a run from machine 0, which need not be one of the hosts."""
    options = ("--set", f"ssh.options=[-F, {sshd.config}]", "--hosts", hosts)
    return sshd.lab.launch(0, *options, *words, cwd=folder, **env)


def test_all_hosts_of_a_file_run_and_paths_and_arguments_arrive_unchanged(sshd: Sshd, folder: Path):
    home, script = folder / "it's $(touch evaluated)", "two\nlines `id`.py"
    home.mkdir()
    (home / script).write_text(ALL_REDUCE)
    (home / "hosts").write_text("# two machines\nhost1 slots=1\nhost2 slots=2  # the bigger one\n")
    options = ("--set", f"ssh.options=[-F, {sshd.config}]", "--hostfile", "hosts", "--show-ranks", "all")
    code, out, err = finish(
        sshd.lab.launch(0, *options, "--distributed-type", "MULTI_CPU", script, *ODD, cwd=home)
    )
    assert code == 0, err
    assert f"rank 0 of 3 on host1 sum 6.0 {ODD!r}" in out
    assert f"rank 2 of 3 on host2 sum 6.0 {ODD!r}" in out
    assert not list(folder.rglob("evaluated"))
    assert "[host2] node 1 of 2" in err


def test_failure_on_one_host_is_reported_once_with_its_code(sshd: Sshd, folder: Path):
    (folder / "fails.py").write_text(
        "import os, sys, time\nprint('out')\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)\n"
    )
    code, out, err = finish(launch(sshd, folder, "host1,host2", *PLAIN, "--json", "fails.py"))
    assert code == 7, err
    assert err.count("rank 1 failed with exit code 7") == 2  # the report, and one line from its own machine
    assert "on host2" in err
    told = json.loads(out)  # nothing but the one object
    assert (told["exit_code"], told["failure"]["rank"]) == (7, 1)


def test_host_that_refuses_is_named_and_nothing_starts(sshd: Sshd, folder: Path):
    sshd.stop_machine(2)
    try:
        code, out, err = finish(launch(sshd, folder, "host1,host2", *PLAIN, "sum.py"))
    finally:
        sshd.start_machine(2)
    assert code == 3
    assert "error: host2: ssh: connect to host host2 port 22: Connection refused" in err
    assert out == ""


def test_host_with_an_unknown_key_is_refused_without_a_question(sshd: Sshd, folder: Path):
    config = folder / "strict"
    config.write_text(sshd.config.read_text().replace("known_hosts", "no_known_hosts"))
    options = ("--set", f"ssh.options=[-F, {config}]", "--hosts", "host1")
    code, _, err = finish(sshd.lab.launch(0, *options, *PLAIN, "sum.py", cwd=folder))
    assert code == 3
    assert "Host key verification failed." in err
    assert "passwords are never asked for" in err


def test_host_that_hangs_is_named_in_time(sshd: Sshd, folder: Path):
    sshd.pause(2)
    options = ("--set", f"ssh.options=[-F, {sshd.config}, -oConnectTimeout=2]", "--hosts", "host1,host2")
    try:
        code, _, err = finish(sshd.lab.launch(0, *options, *PLAIN, "sum.py", cwd=folder))
    finally:
        sshd.go_on(2)
    assert code == 3
    assert "error: host2: Connection timed out during banner exchange" in err
    assert not workers(sshd, 1)


def test_interpreter_that_is_not_there_is_named(sshd: Sshd, folder: Path):
    code, _, err = finish(launch(sshd, folder, "host1", *PLAIN, "--ssh.python", "/no/such/python", "sum.py"))
    assert code == 3
    assert "host1: the launcher did not start: " in err
    assert "set ssh.python" in err


def saving(sshd: Sshd, folder: Path, hosts: str, *options: str) -> "subprocess.Popen[str]":
    """Start a run that saves every step, and wait for its first."""
    state = folder / "state.json"
    every = ("--set", f"launch.env.STATE={state}", "--set", "launch.env.EVERY=1")
    run = launch(sshd, folder, hosts, *every, *PLAIN, *options, "saves.py")
    wait_until(state.exists, 60)
    return run


def test_host_that_dies_in_training_is_lost_and_the_others_end(sshd: Sshd, folder: Path):
    run = saving(sshd, folder, "host1,host2", "--machine-timeout-seconds", "3", "--shutdown-grace-seconds", "3")
    sshd.lab.cut(2)
    try:
        code, _, err = finish(run)
    finally:
        sshd.lab.mend(2)
    assert code == 3
    assert f"lost host2 ({sshd.lab.address(2)}): no message for 3 s" in err
    wait_until(lambda: not workers(sshd, 1), 5)
    wait_until(lambda: not workers(sshd, 2), 30)  # which hears nothing of it, and ends by the silence


def test_interrupt_reaches_every_host_and_saves(sshd: Sshd, folder: Path):
    run = saving(sshd, folder, "host1,host2")
    run.send_signal(signal.SIGTERM)
    code, out, err = finish(run)
    assert code == 75, err
    assert "saved at step" in out
    assert not workers(sshd, 1) + workers(sshd, 2)


def test_nothing_outlives_a_killed_client(sshd: Sshd, folder: Path):
    run = saving(sshd, folder, "host1", "--shutdown-grace-seconds", "1")
    assert workers(sshd, 1)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    wait_until(lambda: not workers(sshd, 1), 20)


def workers(sshd: Sshd, machine: int) -> list[bytes]:
    """What still runs on a machine beside its sshd."""
    return [said for said in sshd.lab.processes(machine).values() if b"python" in said]
