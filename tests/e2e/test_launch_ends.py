"""How a run ends: the launcher's exit code and the rank it names, for every way a worker can end."""

import signal

import pytest

from tests.e2e.conftest import run_to_the_end

RANK = "import os, sys, time, signal; rank = int(os.environ['RANK'])\n"

LATER = """
while rank == 0 and not os.path.exists("failing"):
    time.sleep(0.02)
open("failing", "w").close()
time.sleep(0.5 * (1 - rank))
raise ValueError(f"rank {rank}")
"""

ENDS = {
    "exit-7": ("if rank == 1: sys.exit(7)\ntime.sleep(60)", 7, 1),
    "exception": ("if rank == 1: raise ValueError('no such luck')\ntime.sleep(60)", 1, 1),
    "sigkill": ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)", 137, 1),
    "os-exit": ("if rank == 1: os._exit(9)\ntime.sleep(60)", 9, 1),
    "exit-text": ("if rank == 0: sys.exit('a text')\ntime.sleep(60)", 1, 0),
    "two-fail": (LATER, 1, 1),
}


@pytest.fixture(scope="module")
def ended(side_by_side):
    return side_by_side(run_to_the_end, {name: (RANK + case[0],) for name, case in ENDS.items()})


@pytest.mark.parametrize("case", ENDS)
def test_first_failing_rank_decides_the_exit_code(ended, case):
    run, (_, code, rank) = ended[case].result(), ENDS[case]
    assert run.code == code, run.stderr
    result = run.json()
    assert (result["exit_code"], result["failure"]["rank"]) == (code, rank)


WELL = """
print('hello from', rank)
if rank == 1: sys.exit()
if rank == 2: sys.exit(0)
if rank == 3: os._exit(0)
"""


def test_run_whose_ranks_all_end_well_ends_with_0(launch):
    run = launch(RANK + WELL, "--num-processes", "4")
    assert run.code == 0, run.stderr
    assert run.stdout == "hello from 0\n"
    assert [run.log(rank) for rank in range(4)] == [f"hello from {rank}\n" for rank in range(4)]
    assert run.json()["failure"] is None


WAITING = RANK + "open(f'up{rank}', 'w').write(str(os.getpid()))\n"


def when_up(run) -> list[int]:
    return [int(run.wait_for(f"up{rank}")) for rank in range(2)]


def send_and_wait(start, _folder, text, number, _code):
    run = start(text)
    when_up(run)
    run.signal(getattr(signal, number))
    run.end()
    return run


KILLS = {
    number: (WAITING + "time.sleep(60)", number, code)
    for number, code in (("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138))
}


@pytest.fixture(scope="module")
def killed(side_by_side):
    return side_by_side(send_and_wait, KILLS)


@pytest.mark.parametrize("number", KILLS)
def test_signal_that_kills_the_workers_is_the_exit_code(killed, number):
    run = killed[number].result()
    assert run.code == KILLS[number][2], run.stderr
    assert "Traceback" not in run.stderr
    assert run.json()["stopped_by"] == number


SAVES = WAITING.replace(
    "open(",
    """
got = []
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda n, f: got.append(n))
open(""",
    1,
)
SAVE = SAVES + "while not got: time.sleep(0.02)\ntime.sleep(0.3)\nopen(f'saved{rank}', 'w').write(repr(got))\n"


SAVED = {number: (SAVE, number, code) for number, code in (("SIGUSR1", 75), ("SIGHUP", 75), ("SIGINT", 130))}


@pytest.fixture(scope="module")
def saved(side_by_side):
    return side_by_side(send_and_wait, SAVED)


@pytest.mark.parametrize("number", SAVED)
def test_workers_that_save_and_end_well_after_a_signal(saved, number):
    run = saved[number].result()
    assert run.code == SAVED[number][2], run.stderr
    once = repr([int(getattr(signal, number))])
    assert [run.wait_for(f"saved{rank}", 1) for rank in range(2)] == [once, once]


def test_signal_that_the_launcher_was_told_to_ignore_ends_nothing(start):
    """As under nohup, or in the background of a shell script."""
    text = WAITING + "for _ in range(300):\n    time.sleep(0.02)\n    if os.path.exists('go'): break\n"
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    run = start(text, preexec_fn=ignore)
    when_up(run)
    run.signal(signal.SIGHUP)
    (run.folder / "go").write_text("y")
    assert run.end() == 0, run.stderr


def test_second_interrupt_kills_workers_that_ignore_the_first(start):
    run = start(
        WAITING.replace("open(", "signal.signal(signal.SIGINT, signal.SIG_IGN)\nopen(", 1) + "time.sleep(60)"
    )
    when_up(run)
    run.signal(signal.SIGINT)
    with pytest.raises(Exception, match="timed out"):
        run.process.communicate(timeout=0.5)
    run.signal(signal.SIGINT)
    assert run.end() == 130
    assert "Traceback" not in run.stderr


def test_grace_that_is_over_ends_workers_that_ignore_the_signal(start):
    text = WAITING.replace("open(", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(", 1) + "time.sleep(60)"
    run = start(text, "--launch.shutdown-grace-seconds", "1")
    when_up(run)
    run.signal(signal.SIGTERM)
    assert run.end() == 143


def test_run_that_outlives_a_warning_ends_with_its_own_code(start):
    text = SAVES + "while not got: time.sleep(0.02)\ntime.sleep(1.5)\nsys.exit(3 if rank else 0)"
    run = start(text, "--launch.shutdown-grace-seconds", "0.5")
    when_up(run)
    run.signal(signal.SIGUSR1)
    assert run.end() == 3
    assert run.json()["stopped_by"] is None
