"""What is to be true on GPUs, a topic each; run by `scripts/gpu_check` without development tools, and by pytest.

A topic runs real commands in a folder of its own and returns what it found in a few words, or raises `WrongError`.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.split_models import PLAIN_PLAN

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
SECONDS = 300.0


class WrongError(Exception):
    """What a topic found is not what is to be true."""


@dataclass(frozen=True)
class Machine:
    """Where a topic runs.

    Attributes:
        gpus: How many GPUs torch sees; 0: the topics that can are run by two workers on the CPU.
        folder: The topic's own folder.
    """

    gpus: int
    folder: Path

    @property
    def workers(self) -> int:
        """How many workers most topics start."""
        return min(self.gpus, 2) or 2

    def run(self, *command: str, code: int = 0, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run this Python with arguments.

        Raises:
            WrongError: It ends with another code, or does not end.
        """
        path = os.pathsep.join([str(ROOT), *sys.path[1:]])
        environ = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", **environment}
        whole = [sys.executable, *command]
        try:
            done = subprocess.run(
                whole, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise WrongError(f"no end within {SECONDS:.0f} s: {' '.join(command)}") from None
        if done.returncode != code:
            last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-12:])
            raise WrongError(f"exit code {done.returncode}, not {code}: {last}")
        return done

    def cli(self, *words: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run `fsdplaunch` with arguments."""
        return self.run("-m", "fsdplaunch", *words, code=code)

    def launch(
        self,
        program: str,
        *arguments: str,
        workers: int | None = None,
        by_itself: bool = False,
        code: int = 0,
        **keys: Any,
    ) -> dict[str, Any]:
        """Launch one of the programs, and return what it prints as JSON, of its last such line.

        Args:
            program: Its name in `programs`.
            arguments: Of the program.
            workers: How many; otherwise most topics' number.
            by_itself: Whether the model is sharded without a line in the script.
            code: The exit code that is right.
            keys: Configuration; `__` stands for a dot.
        """
        values = {"num_processes": workers or self.workers, **keys} | ({} if self.gpus else {"use_cpu": True})
        words = [f"--set={key.replace('__', '.')}={_yaml(value)}" for key, value in values.items()]
        # The script's own `prepare` shards one model; the other, which it compares with, stays as it is.
        words += [] if by_itself else ["--shard=explicit", "--allow-unsharded"]
        done = self.cli("launch", *words, str(PROGRAMS / f"{program}.py"), *arguments, code=code)
        return facts(done.stdout)[-1] if code == 0 else {"stderr": done.stderr}


def facts(out: str) -> list[dict[str, Any]]:
    """Return the JSON objects that ranks have printed."""
    lines = [line.partition("{") for line in out.splitlines() if "{" in line]
    if not lines:
        raise WrongError("nothing was printed")
    return [json.loads(bracket + rest) for _, bracket, rest in lines]


def _yaml(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def far(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference of two rows of losses."""
    if len(one) != len(other):
        raise WrongError(f"{len(one)} losses, and {len(other)}")
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(one, other, strict=True))


def need(condition: object, what: str) -> None:
    """Raise `WrongError` where something is not so."""
    if not condition:
        raise WrongError(what)


def prepared(**keys: Any) -> Callable[[Machine], str]:
    """A topic: a prepared model's losses are those of one process, and of a run resumed from its checkpoint."""
    bound = keys.pop("bound", 1e-4)

    def check(machine: Machine) -> str:
        found = machine.launch("fields", str(machine.folder / "ckpt"), **keys)
        apart = far(found["sharded"], found["alone"])
        after = far(found["resumed"], found["sharded"][5:])
        drawn = far(found["dropped resumed"], found["dropped"][5:])
        need(apart <= bound, f"losses are {apart:.0e} from those of one process")
        need(after <= bound, f"losses after loading are {after:.0e} from those without")
        need(drawn <= bound, f"with dropout, losses after loading are {drawn:.0e} from those without")
        if machine.gpus:
            need("nccl" in found["backends"], f"the backends are {found['backends']}")
            wanted = "cpu" if keys.get("fsdp_offload_params") else "cuda"
            need(found["device"] == wanted, f"shards are on {found['device']}")
        return f"one process's losses to {apart:.0e}, after loading to {after:.0e}, with dropout to {drawn:.0e}"

    return check


def doctor(machine: Machine) -> str:
    """`doctor` counts the GPUs that torch sees, and finds no problem."""
    found = json.loads(machine.cli("doctor", "--json").stdout)
    problems = [each["text"] for each in found["checks"] if each["status"] not in ("ok", "skipped", "note")]
    need(not problems, "; ".join(problems))
    return f"{len(found['checks'])} checks"


def on_the_cpu(machine: Machine) -> str:
    """Workers of `--cpu` see no GPU, here where there may be one."""
    program = str(PROGRAMS / "no_gpu.py")
    done = machine.cli("launch", "--cpu", "--num_processes=2", "--allow-unsharded", program)
    seen = facts(done.stdout)[-1]
    need(seen == {"available": False, "count": 0}, f"they see {seen}")
    return "none is visible"


def which_gpu(machine: Machine) -> str:
    """Each worker's tensors are on a GPU of its own, however the script names it."""
    words = (f"--num_processes={machine.gpus}", "--show_ranks=all", "--allow-unsharded")
    found = facts(machine.cli("launch", *words, str(PROGRAMS / "which_gpu.py")).stdout)
    for way in ("cuda", "set_device", "cuda:0"):
        places = {each[way] for each in found}
        need(len(places) == machine.gpus, f"{machine.gpus} workers, {len(places)} GPUs by {way}")
    return f"{machine.gpus} workers, each on its own"


def plain(machine: Machine) -> str:
    """A script for one process, the global batch kept: its own numbers, with BatchNorm; saved once, in full."""
    before = facts(
        machine.run(str(PROGRAMS / "plain.py"), CUDA_VISIBLE_DEVICES="0" if machine.gpus else "").stdout
    )
    found = machine.launch("plain", by_itself=True, launch__keep_global_batch=True)
    apart = far(found["losses"], before[-1]["losses"])
    need(apart <= 1e-3, f"losses are {apart:.0e} from those of one process")
    machine.launch("plain", by_itself=True)
    return f"one process's losses to {apart:.0e}"


def rank0(machine: Machine) -> str:
    """What rank 0 alone saves and evaluates while others run on is of one step."""
    found = machine.launch("rank0", by_itself=True)
    need(found["saves"] == 4, f"{found['saves']} saves of 4")
    need(max(found["far"]) <= 1e-4, f"saved weights are {found['far']} from those of their step")
    return f"4 saves, {max(found['far']):.0e} from the weights of their step"


def groups(machine: Machine) -> str:
    """A mesh of two axes and a gloo group of some ranks work beside the run's own group."""
    found = machine.launch("groups", workers=max(machine.gpus, 2))
    need(set(found["sum"]) == {float(found["world"])}, f"a sum over {found['world']} ranks is {found['sum']}")
    wanted = "nccl" if machine.gpus else "gloo"
    need(found["backend"] == wanted, f"get_backend() is {found['backend']}, not {wanted}")
    return f"{found['world']} ranks, {found['backend']}"


def split(words: str, **keys: Any) -> Callable[[Machine], str]:
    """A topic: split layers or sequences, which the model's description names, compute what one process does."""

    def check(machine: Machine) -> str:
        found = machine.launch("split", **keys)
        need(words in found["line"], f"'{words}' is not in: {found['line']}")
        apart = far(found["split"], found["alone"])
        need(apart <= 1e-3, f"losses are {apart:.0e} from those of one process")
        return f"one process's losses to {apart:.0e}"

    return check


def out_of_memory(machine: Machine) -> str:
    """The report of a run that ran out of GPU memory says so, and what to try."""
    said = machine.launch("memory", "oom", code=1)["stderr"]
    need("out of memory" in said, f"the report does not say it: {said[-300:]}")
    need("\n  why " in said and "\n  try " in said, f"the report has no why and try: {said[-300:]}")
    return "named, with what to try"


def estimated(**keys: Any) -> Callable[[Machine], str]:
    """A topic: what `estimate` says of a run, without activations, is a part of what the allocator measures."""
    least = keys.pop("least", 0.3)

    def check(machine: Machine) -> str:
        words = [f"--set={key}={_yaml(value)}" for key, value in keys.items()]
        words += ["--world-size", str(machine.workers), "--batch-size", "4", "--seq-len", "512", "--json"]
        program = f"{PROGRAMS / 'memory.py'}:Model"
        said = json.loads(machine.cli("estimate", program, "--gpu-memory", "80GB", *words).stdout)
        allocated = said["strategies"][0]["allocated"]
        peak = machine.launch("memory", **keys)["peak"]
        ratio = allocated / peak
        need(least <= ratio <= 1.1, f"{allocated / 2**30:.2f} GiB for {peak / 2**30:.2f} GiB")
        return f"{allocated / 2**30:.2f} GiB for {peak / 2**30:.2f} GiB, {ratio:.2f} of it"

    return check


def steps(machine: Machine) -> str:
    """A step of a prepared model takes no longer than one of hand-written `fully_shard`, but for a tenth."""
    command = (str(ROOT / "scripts" / "bench" / "step"), "train", "10", "--ranks", str(machine.workers))
    rows = [line.split() for line in machine.run(*command).stdout.splitlines()]
    ratios = {row[0]: float(row[4]) for row in rows if row[1:2] == ["wall"]}
    need(len(ratios) == 2 and max(ratios.values()) <= 1.1, f"of the time by hand: {ratios}")
    return ", ".join(f"{version} {ratio:.2f} of the time by hand" for version, ratio in ratios.items())


def checks(machine: Machine) -> str:
    """`check` and `check --compare` of a plain script."""
    machine.cli("check", "--steps=2", str(PROGRAMS / "plain.py"))
    found = json.loads(machine.cli("check", "--compare", "--json", str(PROGRAMS / "plain.py")).stdout)
    need(found["equal"], f"not equal: {found['cause']}")
    return f"equal to {found['largest_difference']:.0e}"


def merged(machine: Machine) -> str:
    """A sharded checkpoint merges into safetensors, which are read back and compared."""
    machine.launch("fields", str(machine.folder / "ckpt"), fsdp_version=2)
    machine.cli("merge-weights", str(machine.folder / "ckpt"), str(machine.folder / "out"), "--verify")
    size = (machine.folder / "out" / "model.safetensors").stat().st_size
    return f"{size} bytes"


def forked(machine: Machine) -> str:
    """Workers start as forks of an interpreter with torch in it, and as fresh ones; both reach their GPUs."""
    machine.launch("fields", str(machine.folder / "forked"), launch__preload="torch.nn")
    machine.launch("fields", str(machine.folder / "fresh"), launch__preload="none")
    return "forked and fresh"


def kernels(machine: Machine) -> str:
    """Attention kernels' results for parts of the keys add up, as the rings of split sequences need."""
    return facts(machine.run(str(PROGRAMS / "kernels.py")).stdout)[-1]["found"]


@dataclass(frozen=True)
class Topic:
    """One thing to be true.

    Attributes:
        name: As printed.
        check: Runs it.
        gpus: How many it needs.
        on_cpu: Whether it can be run without a GPU, to see that the check itself works.
    """

    name: str
    check: Callable[[Machine], str]
    gpus: int = 1
    on_cpu: bool = True


SPLIT = "parallelism_config__parallelism_config_"
RECOMPUTED = {"mixed_precision": "bf16", "fsdp_activation_checkpointing": True}
BF16 = {"mixed_precision": "bf16", "bound": 0.1}
TOPICS = (
    Topic("doctor", doctor),
    Topic("--cpu hides the GPUs", on_the_cpu),
    Topic("which GPU", which_gpu, on_cpu=False),
    Topic("FSDP2", prepared(fsdp_version=2)),
    Topic("FSDP1", prepared(fsdp_version=1)),
    Topic("FSDP2, bf16", prepared(fsdp_version=2, **BF16)),
    Topic("FSDP1, fp16", prepared(fsdp_version=1, mixed_precision="fp16", bound=0.2), on_cpu=False),
    Topic("FSDP2, shards in host memory", prepared(fsdp_version=2, fsdp_offload_params=True)),
    Topic("FSDP1, shards in host memory", prepared(fsdp_version=1, fsdp_offload_params=True), on_cpu=False),
    Topic("activation checkpointing", prepared(fsdp_version=2, fsdp_activation_checkpointing=True)),
    Topic("asynchronous saves", prepared(fsdp_version=2, checkpoint__async=True)),
    Topic("full state dicts", prepared(fsdp_version=2, fsdp_state_dict_type="FULL_STATE_DICT")),
    Topic("preload and fork", forked),
    Topic("merge-weights", merged),
    Topic("a plain script", plain),
    Topic("check and check --compare", checks),
    Topic("rank 0 alone saves and evaluates", rank0),
    Topic("out of memory", out_of_memory, on_cpu=False),
    Topic("attention kernels", kernels, on_cpu=False),
    Topic("estimate, FSDP2", estimated(fsdp_version=2), on_cpu=False),
    Topic("estimate, FSDP1", estimated(fsdp_version=1), on_cpu=False),
    # What is left on the GPU are units on their way and activations, which a script's model is estimated without.
    Topic("estimate, offload", estimated(fsdp_version=2, fsdp_offload_params=True, least=0.02), on_cpu=False),
    Topic("estimate, bf16 and recomputing", estimated(fsdp_version=2, **RECOMPUTED), on_cpu=False),
    Topic("a step against fully_shard", steps, on_cpu=False),
    Topic("groups", groups, gpus=2),
    Topic(
        "layers split",
        split("layers split", **{f"{SPLIT}tp_size": 2, "sharding__tensor_parallel_plan": PLAIN_PLAN}),
        gpus=2,
    ),
    Topic("sequences split", split("sequences split", **{f"{SPLIT}cp_size": 2}), gpus=2),
    Topic(
        "attention by ring",
        split("attention by ring", **{f"{SPLIT}cp_size": 2, "sharding__context_parallel_attention": "ring"}),
        gpus=2,
    ),
    Topic(
        "replicas of shards",
        prepared(
            fsdp_version=2, num_processes=4, fsdp_reshard_after_forward=True, **{f"{SPLIT}dp_replicate_size": 2}
        ),
        gpus=4,
        on_cpu=False,
    ),
)


def reason_to_skip(topic: Topic, gpus: int) -> str:
    """Return why a topic cannot be run here; empty where it can."""
    if gpus == 0:
        return "" if topic.on_cpu else "needs a GPU"
    return "" if gpus >= topic.gpus else f"needs {topic.gpus} GPUs"


def run_topic(topic: Topic, gpus: int, folder: Path) -> str:
    """Run one topic in a fresh folder, and return what it found.

    Raises:
        WrongError: It is not as it is to be.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return topic.check(Machine(gpus, folder))
