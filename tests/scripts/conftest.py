"""Run programs as plain python does and as launched workers, and read back what they printed and wrote."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdplaunch.config.environment import encode
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import build_config, keys_by_path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
EQUAL = Path(__file__).parent / "equal"
RANKS = int(os.environ.get("FSDPLAUNCH_TEST_RANKS", "2"))
"""Over how many ranks a program is compared with one process: scripts/campaigns/four_ranks sets 4."""
LOSS = re.compile(r"\bloss[ =:]+(-?\d+\.\d+)")


def lines(text: str) -> dict[str, list[float]]:
    """Return the numbers of each line by its name."""
    named = (line.split(":") for line in text.splitlines() if ": " in line)
    return {name: [float(number) for number in numbers.split()] for name, numbers in named}


@dataclass(frozen=True)
class Run:
    """What a program left behind.

    Attributes:
        codes: Exit status of each rank.
        out: What each rank wrote to stdout.
        err: What each rank wrote to stderr.
        folder: Where it ran.
        parameters: What each rank's parameters were at the end.
    """

    codes: list[int]
    out: list[str]
    err: list[str]
    folder: Path
    parameters: list[list[dict[str, Any]]]

    def losses(self) -> list[float]:
        """Return the mean over ranks of each loss printed, in order."""
        each = [[float(found) for found in LOSS.findall(text)] for text in self.out]
        assert len({len(one) for one in each}) == 1, self.out
        return [sum(values) / len(values) for values in zip(*each, strict=True)]


MARK = "--- next ---\n"
BESIDE = """
import sys, traceback
for text in {texts!r}.values():
    print("--- next ---", flush=True)
    print("--- next ---", file=sys.stderr, flush=True)
    try:
        exec(compile(text, "train.py", "exec"), {{"__name__": "__main__"}})
    except Exception:
        traceback.print_exc()
"""


class Forks:
    """The process that forks."""

    def __init__(self) -> None:
        prefixes = ("FSDP", "ACCELERATE_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.scripts.forks"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def passes(self, script: Path | str, folder: Path, *arguments: str, **more: Any) -> Run:
        """Do what `run` does with a script that ends without an error."""
        done = self.run(script, folder, *arguments, **more)
        assert not any(done.codes), "\n".join(done.err)
        return done

    def run(
        self,
        script: Path | str,
        folder: Path,
        *arguments: str,
        ranks: int = 0,
        torchrun: bool = False,
        timeout: float = 90.0,
        environ: Mapping[str, str] | None = None,
        **keys: Any,
    ) -> Run:
        """Run a script in a folder.

        Args:
            script: Its file, or the text of a `train.py` beside the folder.
            folder: Where; made if needed.
            arguments: Of the script.
            ranks: How many workers; 0 for plain python.
            torchrun: Start the script itself on every rank, as torchrun does, and not the bootstrap.
            timeout: Seconds until it counts as hung.
            environ: Further variables.
            keys: Configuration, `launch__shard="explicit"`.
        """
        logs = folder.with_name(folder.name + "-logs")
        folder.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        if isinstance(script, str):
            (folder.parent / "train.py").write_text(script)
            script = folder.parent / "train.py"
        request = {
            "script": str(script),
            "folder": str(folder),
            "logs": str(logs),
            "arguments": arguments,
            "ranks": ranks,
            "torchrun": torchrun,
            "timeout": timeout,
            "env": (environment(ranks, keys) if ranks else {}) | dict(environ or {}),
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        facts = [logs / f"{rank}.facts.json" for rank in range(len(codes))]
        return Run(
            codes=codes,
            out=[(logs / f"{rank}.out").read_text() for rank in range(len(codes))],
            err=[(logs / f"{rank}.err").read_text() for rank in range(len(codes))],
            folder=folder,
            parameters=[json.loads(fact.read_text()) for fact in facts if fact.exists()],
        )

    def beside(self, folder: Path, texts: Mapping[Any, str], *, ranks: int = RANKS, **keys: Any) -> dict[Any, Run]:
        """Run several texts one after the other in one launch, each as `train.py`; errors end that text only.

        Returns:
            What each has written, by its name; an error's traceback is at the end of `err`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "beside.py").write_text(BESIDE.format(texts=dict(texts)))
        done = self.run(folder / "beside.py", folder / "run", ranks=ranks, **keys)
        assert done.codes == [0] * ranks, done.err
        found = {}
        for number, name in enumerate(texts):
            out, err = ([text.split(MARK)[number + 1] for text in texts_] for texts_ in (done.out, done.err))
            found[name] = Run(codes=done.codes, out=out, err=err, folder=done.folder, parameters=done.parameters)
        return found

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)


def environment(ranks: int, keys: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a CPU run over some ranks with these keys."""
    base = {"distributed_type": "FSDP", "use_cpu": True, "num_processes": ranks, "fsdp_config__fsdp_version": 2}
    given = {tuple(name.split("__")): value for name, value in (base | keys).items()}
    assert set(given) <= set(keys_by_path()), given
    return encode(resolve(build_config(given)))


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.stop()
