"""A script under the bootstrap behaves as under python, and its end is told apart correctly."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.bootstrapped import forked_workers

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP", "ACCELERATE"))}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def alone(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """One worker of a run that shards nothing: no torch is involved."""
    command = [sys.executable, "-m", "fsdplaunch.runtime.bootstrap", *argv]
    variables = environment(FSDPLAUNCH_DISTRIBUTED_TYPE="NO", **env)
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=60)


def workers(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Two workers under torch's own launcher."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "fsdplaunch.runtime.bootstrap", *argv]
    return subprocess.run(command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=120)


FACTS = """
    import json, os, pickle, sys

    class Thing:
        def __eq__(self, other):
            return isinstance(other, Thing)

    main = sys.modules["__main__"]
    facts = {
        "name": __name__, "file": __file__, "doc": __doc__, "package": __package__, "argv": sys.argv,
        "path": sys.path[0], "spec": getattr(__spec__, "name", None), "cached": __cached__ is None,
        "main": main.__dict__ is globals(), "pickle": pickle.loads(pickle.dumps(Thing())) == Thing(),
        "builtins": __builtins__ is sys.modules["builtins"], "loader": type(__loader__).__name__,
    }
    print(json.dumps(facts))
"""


def facts_under_both(cwd: Path, *argv: str) -> tuple[dict[str, Any], dict[str, Any]]:
    python = subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert python.returncode == 0, python.stderr
    ours = alone(*argv, cwd=cwd)
    assert ours.returncode == 0, ours.stderr
    return json.loads(python.stdout), json.loads(ours.stdout)


@pytest.mark.parametrize("place", ["here.py", "deep/er/script.py"])
def test_script_sees_what_it_sees_under_python(tmp_path: Path, place: str) -> None:
    write(tmp_path / place, FACTS)
    python, ours = facts_under_both(tmp_path, place, "--lr", "3e-4", "-m", "--help")
    assert ours == python


def test_script_behind_a_link_finds_its_neighbours(tmp_path: Path) -> None:
    real = write(tmp_path / "real" / "script.py", FACTS)
    (tmp_path / "link.py").symlink_to(real)
    python, ours = facts_under_both(tmp_path, "link.py")
    assert ours == python


def test_module_sees_what_it_sees_under_python(tmp_path: Path) -> None:
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "train.py", FACTS)
    write(tmp_path / "package" / "__main__.py", FACTS)
    for name in ("package.train", "package"):
        python, ours = facts_under_both(tmp_path, "-m", name, "a", "b")
        assert ours == python


def test_folder_with_a_main_runs(tmp_path: Path) -> None:
    write(tmp_path / "app" / "__main__.py", FACTS)
    python, ours = facts_under_both(tmp_path, "app", "x")
    assert (ours["argv"], ours["path"], ours["name"]) == (python["argv"], python["path"], "__main__")


def test_exit_handlers_and_threads_still_find_the_scripts_names(tmp_path: Path) -> None:
    write(
        tmp_path / "late.py",
        """
        import atexit, threading, time
        WORD = "kept"
        atexit.register(lambda: print("handler", WORD))
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread", WORD))).start()
        """,
    )
    done = alone("late.py", cwd=tmp_path)
    assert done.stdout.splitlines() == ["thread kept", "handler kept"]


def test_spawned_children_import_the_script(tmp_path: Path) -> None:
    write(
        tmp_path / "spawning.py",
        """
        import multiprocessing

        def work(queue):
            queue.put(__name__)

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            child = context.Process(target=work, args=(queue,))
            child.start()
            print(queue.get(timeout=30))
            child.join()
        """,
    )
    assert alone("spawning.py", cwd=tmp_path).stdout.strip() == "__mp_main__"


@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('gave up')", 1, "gave up"),
        ("import sys; sys.exit()", 0, ""),
        ("raise SystemExit(0)", 0, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("x = = 1", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_end_of_a_script_becomes_its_status(tmp_path: Path, line: str, status: int, says: str) -> None:
    write(tmp_path / "script.py", line)
    error_file = tmp_path / "error.json"
    done = alone("script.py", cwd=tmp_path, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert done.returncode == status
    assert says in done.stderr
    assert done.stderr.count(says) == 1 or not says
    assert error_file.exists() == (status not in (0, 130))


def test_failure_is_recorded_from_the_users_first_line_on(tmp_path: Path) -> None:
    script = write(
        tmp_path / "script.py",
        """
        def inner():
            raise ValueError("boom")

        inner()
        """,
    )
    error_file = tmp_path / "error.json"
    before = time.time_ns()
    done = alone("script.py", cwd=tmp_path, TORCHELASTIC_ERROR_FILE=str(error_file))
    message = json.loads(error_file.read_text())["message"]
    frames = [line for line in message["extraInfo"]["py_callstack"].splitlines() if line.startswith("  File")]
    assert frames == [f'  File "{script}", line 5, in <module>', f'  File "{script}", line 3, in inner']
    assert message["message"] == "ValueError: boom"
    assert before < message["extraInfo"]["time_ns"] < time.time_ns()
    assert "runtime/bootstrap.py" not in done.stderr


def test_hook_of_the_script_prints_its_failure(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hooked", kind.__name__, trace.tb_lineno)
        raise ValueError("boom")
        """,
    )
    done = alone("script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (1, "hooked ValueError 4", "")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no script to run"),
        (["missing.py"], "cannot read script missing.py: No such file or directory"),
        (["-m", "no_such_module"], "no module to run at no_such_module"),
    ],
)
def test_nothing_to_run_is_reported_in_one_sentence(tmp_path: Path, argv: list[str], says: str) -> None:
    done = alone(*argv, cwd=tmp_path)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_worker_dies_with_its_parent(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import os, pathlib, time
        pathlib.Path("pid").write_text(str(os.getpid()))
        time.sleep(60)
        """,
    )
    command = f"{sys.executable} -m fsdplaunch.runtime.bootstrap script.py & wait"
    variables = environment(FSDPLAUNCH_DISTRIBUTED_TYPE="NO")
    parent = subprocess.Popen(["bash", "-c", command], cwd=tmp_path, env=variables)
    for _ in range(300):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
        time.sleep(0.1)
    worker = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    for _ in range(100):
        try:
            state = Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its parent by 10 s")


def test_wrong_variable_is_named(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "print('ran')")
    done = alone("script.py", cwd=tmp_path, FSDP_VERSION="3")
    assert (done.returncode, done.stdout) == (1, "")
    assert "environment variable FSDP_VERSION must be one of 1, 2, got '3'" in done.stderr


# With torch and two workers


def test_training_script_runs_shards_and_leaves_its_marks(tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        """
        import os, sys
        import torch
        import torch.distributed as dist
        from torch import nn
        import fsdplaunch

        dist.init_process_group("gloo")  # as scripts for torchrun do; the group is there already
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model, optimizer = fsdplaunch.prepare(model, torch.optim.AdamW(model.parameters()))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        line = f"rank {dist.get_rank()} of {dist.get_world_size()} {sys.argv[1:]} {dist.get_backend()}\\n"
        sys.stdout.write(line)  # one write: the other rank's line must not come between
        """,
    )
    run_dir = tmp_path / "run"
    done = workers("train.py", "--lr", "1", cwd=tmp_path, FSDPLAUNCH_RUN_DIR=str(run_dir))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 ['--lr', '1'] gloo" for rank in (0, 1)]
    assert done.stderr.count("sharded Sequential: 2 x Linear, 40 parameters, FSDP2 FULL_SHARD over 2 ranks") == 1
    assert all((run_dir / "ranks" / str(rank) / "sharded").exists() for rank in (0, 1))


NEVER = "train.py ended without sharding a model: 2 workers trained independent replicas"


def test_script_that_never_shards_fails_with_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "print('trained')")
    run_dir = tmp_path / "run"
    done = forked_workers("train.py", cwd=tmp_path, FSDPLAUNCH_RUN_DIR=str(run_dir))
    assert done.codes == [1, 1], done.stderr
    assert done.stdout == "trained\ntrained\n", done.stderr
    assert done.stderr.count(NEVER) == 2
    assert "fsdplaunch.prepare(model, ...)" in done.stderr
    assert not (run_dir / "ranks" / "0" / "sharded").exists()


@pytest.mark.parametrize(
    ("shard", "codes", "says"),
    [
        ("explicit", [1, 1], "2 workers each held a full replica (DistributedDataParallel)"),
        ("auto", [0, 0], "sharded Linear: one unit, 20 parameters, FSDP2 FULL_SHARD over 2 ranks, fp32 kept"),
    ],
)
def test_replicas_are_sharded_or_named(tmp_path: Path, shard: str, codes: list[int], says: str) -> None:
    write(
        tmp_path / "train.py",
        """
        from torch import nn
        nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        """,
    )
    done = forked_workers("train.py", cwd=tmp_path, FSDPLAUNCH_LAUNCH_SHARD=shard)
    assert done.codes == codes, done.stderr
    assert says in done.stderr


def test_unsharded_end_may_be_allowed(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "print('trained')")
    done = forked_workers("train.py", cwd=tmp_path, FSDPLAUNCH_ALLOW_UNSHARDED="1")
    assert done.codes == [0, 0], done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "fully_shard(model, mesh=init_device_mesh('cpu', (2,)))",
        "model = FSDP(model, device_id=torch.device('cpu'))",
    ],
)
def test_sharding_by_the_scripts_own_code_counts(tmp_path: Path, line: str) -> None:
    write(
        tmp_path / "train.py",
        f"""
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard

        def main():
            model = nn.Linear(4, 4)
            {line}

        main()  # the model is garbage by now
        """,
    )
    done = forked_workers("train.py", cwd=tmp_path)
    assert done.codes == [0, 0], done.stderr


def test_failing_rank_is_reported_and_no_rank_hangs(tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        """
        import torch.distributed as dist
        if dist.get_rank() == 1:
            raise ValueError("boom on one")
        dist.barrier()
        """,
    )
    started = time.monotonic()
    done = workers("train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "ValueError: boom on one" in done.stderr
    assert time.monotonic() - started < 60
