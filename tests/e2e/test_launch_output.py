"""What reaches the terminal, and what the run's folder keeps."""

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import run_to_the_end

RANK = "import os, sys, time; rank = int(os.environ['RANK'])\n"


BLOB = bytes(range(256)) * 40 + b"no newline at the end"
LINES = "for i in range(50):\n    print(f'{rank} line {i}'); sys.stderr.write(f'{rank} bar {i}\\r')\n"
CASES = {
    "lines": (RANK + LINES, "--show-ranks", "all"),
    "bytes": (RANK + f"sys.stdout.buffer.write(bytes(range(256)) * 40 + {BLOB[-21:]!r})\n",),
    "c": (RANK + "import ctypes; ctypes.CDLL(None).puts(b'from c'); os.system('echo from a child')\n",),
}


@pytest.fixture(scope="module")
def printed(side_by_side):
    return side_by_side(partial(run_to_the_end, binary=True), CASES)


def test_shown_ranks_have_a_prefix_and_whole_lines(printed):
    run = printed["lines"].result()
    shown = run.stdout.decode().splitlines()
    for rank in (0, 1):
        lines = [line for line in shown if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] {rank} line {i}" for i in range(50)]
        assert f"[{rank}] {rank} bar 49" in run.stderr.decode().splitlines()
    assert len(shown) == 100


def test_bytes_of_a_single_shown_rank_pass_untouched(printed):
    run = printed["bytes"].result()
    assert run.stdout == BLOB
    assert (run.dir / "ranks/0/stdout.log").read_bytes() == BLOB
    assert (run.dir / "ranks/1/stdout.log").read_bytes() == BLOB


def test_output_of_c_code_and_children_is_captured(printed):
    run = printed["c"].result()
    assert sorted(run.log(1).splitlines()) == ["from a child", "from c"]
    assert sorted(run.stdout.decode().splitlines()) == ["from a child", "from c"]


def test_a_child_that_keeps_the_output_open_does_not_hold_up_the_end(launch):
    text = RANK + (
        "import subprocess; child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open(f'child{rank}', 'w').write(str(child.pid)); print('done')\n"
    )
    run = launch(text)  # which waits less long
    assert (run.code, run.stdout) == (0, "done\n")
    for rank in range(2):
        with suppress(ProcessLookupError):
            os.kill(int((run.folder / f"child{rank}").read_text()), signal.SIGKILL)


def test_100_mb_from_each_rank_pass_without_filling_memory(launch):
    text = RANK + "line = 'x' * 9999\nfor _ in range(10_000): print(line)\n"
    with Path(os.devnull).open("w") as nothing:
        run = launch(text, "--show-ranks", "0", stdout=nothing)
    assert run.code == 0, run.stderr
    sizes = [(run.dir / "ranks" / str(rank) / "stdout.log").stat().st_size for rank in range(2)]
    assert sizes == [100_000_000, 100_000_000]
    assert run.json("agent.json")["peak_bytes"] < 2**30


def test_rank_on_a_terminal_sees_a_terminal_of_the_same_size(start, tmp_path):
    text = RANK + "if rank == 0: print(os.isatty(1), os.isatty(2), *os.get_terminal_size(1))\n"
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "rows", "33", "cols", "77"], stdin=theirs, check=True)
    run = start(text, stdout=theirs, stderr=subprocess.DEVNULL)
    assert run.end() == 0
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert shown == "True False 77 33\r\n"
    assert run.log(0) == "True False 77 33\n"


def test_folder_holds_plan_result_and_latest_and_the_temporary_folder_nothing(launch, tmp_path):
    place = tmp_path / "tmp"
    place.mkdir()
    run = launch("pass", env={"TMPDIR": str(place)})
    assert run.code == 0
    assert {path.name for path in run.dir.iterdir()} >= {"plan.json", "result.json", "config.yaml", "ranks"}
    assert run.json("plan.json")["workers"] == 2
    assert (run.folder / "runs/latest").readlink() == Path(run.dir.name)
    assert list(place.iterdir()) == []  # bare torchrun leaves a folder there


def test_closed_standard_streams_are_no_obstacle(tmp_path):
    (tmp_path / "t.py").write_text("print('x')")
    command = f"{sys.executable} -m fsdplaunch launch --distributed-type MULTI_CPU t.py <&- >&- 2>&-"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FSDP")}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environ, timeout=120)
    assert done.returncode == 0
    assert (tmp_path / "runs/latest/ranks/1/stdout.log").read_text() == "x\n"
