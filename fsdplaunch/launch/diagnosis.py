"""Why a run failed and what to try, from what is recorded. Pure: one small function per kind of failure."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdplaunch.config.schema.config import Config
from fsdplaunch.display_text import GIB, listed
from fsdplaunch.launch.root_cause import UNEQUAL_COLLECTIVES, Worker, has_failed, is_consequence, own_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is said about a failure.

    Attributes:
        why: The reason, in one sentence; empty when the exception says it all.
        remedies: What to try, the best first.
    """

    why: str = ""
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFacts:
    """What is known about a failed attempt.

    Attributes:
        cause: The worker that failed first.
        workers: All workers of the attempt.
        config: The configuration it ran with; None when it is not known.
        memory_kills: How often the kernel killed a process of this job for want of memory, while it ran.
        memory_limit: Host memory the job may use, in bytes; None when unknown.
        python: The interpreter the workers ran in.
    """

    cause: Worker
    workers: Sequence[Worker]
    config: Config | None = None
    memory_kills: int = 0
    memory_limit: int | None = None
    python: str = "python"

    @property
    def text(self) -> str:
        """Return the exception, or else the last lines of the error output."""
        error = self.cause["error"]
        return (error["message"] or "") if error else "\n".join(self.cause["tail"])

    @property
    def died_of(self) -> str:
        """Return the signal that killed the worker, or nothing; not one that the launcher sent."""
        return own_signal(self.cause) or ""


def failure_facts(record: Mapping[str, Any], config: Config | None, python: str) -> FailureFacts | None:
    """Return what an agent's record says about its last attempt; None when no worker failed in it.

    Args:
        record: What the agent wrote.
        config: The configuration.
        python: The interpreter the workers ran in.
    """
    attempts = record.get("attempts") or []
    cause = attempts[-1]["cause"] if attempts else None
    if cause is None:
        return None
    return FailureFacts(
        cause=cause,
        workers=attempts[-1]["workers"],
        config=config,
        memory_kills=record.get("memory_kills") or 0,
        memory_limit=record.get("memory_limit"),
        python=python,
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return some numbers, `1, 2 and 9 more` when there are many."""
    return listed(list(map(str, ranks)), 8)


_TIMEOUT = re.compile(
    r"Timed out waiting|Watchdog caught collective operation timeout|Collective .* timed? ?out|Wait timeout", re.I
)


def collective_timeout(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a rank that waited for others that did not come."""
    if not _TIMEOUT.search(facts.text):
        return None
    waited = {worker["rank"] for worker in facts.workers if has_failed(worker) and is_consequence(worker)}
    missing = [worker["rank"] for worker in facts.workers if worker["rank"] not in waited]
    seconds = facts.config.launch.process_group_timeout_seconds if facts.config else None
    limit = f" for {seconds:.0f} s" if seconds else ""
    who = f"rank {name_ranks(missing)}, which did not come" if missing else "the others, which did not come"
    return Diagnosis(
        why=f"it waited in a collective{limit} for {who}: ranks took different paths, or one is slow",
        remedies=(
            "check that every rank makes the same calls, evaluation and saving included",
            "--process-group-timeout-seconds with a larger number, if one rank is meant to take long",
        ),
    )


def unequal_collectives(facts: FailureFacts) -> Diagnosis | None:
    """Recognise ranks that were in different collectives, of which gloo aborts one."""
    if UNEQUAL_COLLECTIVES not in facts.text:
        return None
    draws_own = facts.config is None or not facts.config.launch.keep_global_batch
    alike = "--keep-global-batch, if the script chooses by random numbers: all ranks then draw the same"
    return Diagnosis(
        why="ranks were in different collectives: one called or trained a model where another did not",
        remedies=(
            *((alike,) if draws_own else ()),
            "check that every rank makes the same calls, evaluation and saving included",
        ),
    )


def lost_connection(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a broken connection of which nothing else is known."""
    if not is_consequence(facts.cause):
        return None
    return Diagnosis(
        why="the connection to another rank broke, and no rank of this node says why",
        remedies=("look at the other nodes' logs; on one node, at every rank's stderr.log",),
    )


def port_in_use(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a port that something else holds."""
    if "Address already in use" not in facts.text and "EADDRINUSE" not in facts.text:
        return None
    return Diagnosis(
        why="a port the run needs is held by another program",
        remedies=("leave main_process_port out to take a free one", "see who holds it: ss -ltnp"),
    )


def killed_from_outside(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a SIGKILL without a trace: somebody sent it, or the node ran out of memory."""
    if facts.died_of not in ("SIGKILL", "SIGTERM"):
        return None
    return Diagnosis(
        why=f"something outside this run sent {facts.died_of}: a user, a scheduler, or the kernel of a node"
        " without memory",
        remedies=("the scheduler's log; as root: dmesg | grep -i 'killed process'",),
    )


_SIZE = r"([\d.]+ [KMGT]iB)"


def gpu_out_of_memory(facts: FailureFacts) -> Diagnosis | None:
    """Recognise CUDA out of memory: what was requested, what there was, which keys save memory."""
    if "CUDA out of memory" not in facts.text and "OutOfMemoryError" not in facts.text:
        return None
    asked = re.search(rf"Tried to allocate {_SIZE}", facts.text)
    total = re.search(rf"total capacity of {_SIZE}", facts.text)
    free = re.search(rf"of which {_SIZE} is free", facts.text)
    why = "the GPU's memory is used up"
    if total and free:
        why = f"of the GPU's {total[1]} only {free[1]} were free" + (
            f", and {asked[1]} were wanted" if asked else ""
        )
    others = re.search(rf"Process \d+ has {_SIZE} memory in use", facts.text)
    if others:
        why += f"; another process holds {others[1]}"
    return Diagnosis(why=why, remedies=tuple(_savings(facts.config)))


def _savings(config: Config | None) -> list[str]:
    """Return keys that save GPU memory and are not in use, the cheapest first."""
    if config is None or config.distributed_type != "FSDP":
        return ["a smaller batch"]
    fsdp = config.fsdp_config
    found = [
        ("--fsdp-activation-checkpointing true", not fsdp.fsdp_activation_checkpointing),
        ("--mixed-precision bf16", config.mixed_precision == "no" and config.precision.param is None),
        ("--fsdp-sharding-strategy FULL_SHARD", fsdp.fsdp_sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
        ("a smaller batch", True),
        ("--fsdp-offload-params true (slower)", not fsdp.fsdp_offload_params),
    ]
    return [text for text, applies in found if applies]


def host_out_of_memory(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a SIGKILL that we did not send, where the kernel has counted a kill for want of memory."""
    if facts.died_of != "SIGKILL" or not facts.memory_kills:
        return None
    limit = f" of {facts.memory_limit / GIB:.1f} GiB" if facts.memory_limit else ""
    peak = facts.cause["peak_bytes"]
    held = f"; this rank held up to {peak / GIB:.1f} GiB" if peak else ""
    remedies = ["more host memory, or fewer data loader workers"]
    if facts.config is not None and not facts.config.fsdp_config.fsdp_cpu_ram_efficient_loading:
        remedies.insert(0, "--fsdp-cpu-ram-efficient-loading true, so that only rank 0 loads the full model")
    return Diagnosis(
        why=f"the kernel killed it: the memory limit{limit} was reached{held}", remedies=tuple(remedies)
    )


def bus_error(facts: FailureFacts) -> Diagnosis | None:
    """Recognise SIGBUS: shared memory that is too small, nearly always."""
    if facts.died_of != "SIGBUS" and "insufficient shared memory" not in facts.text:
        return None
    return Diagnosis(
        why="shared memory (/dev/shm) is used up, which data loaders pass their batches through",
        remedies=("fewer data loader workers", "a larger /dev/shm (docker run --shm-size=8g)"),
    )


def disk_full(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a full disk."""
    if "No space left on device" not in facts.text and "Disk quota exceeded" not in facts.text:
        return None
    return Diagnosis(why="the disk is full", remedies=("make room, or choose another --checkpoint.dir",))


def own_hint(facts: FailureFacts) -> Diagnosis | None:
    """Recognise an error of this package, which brings its own hint."""
    _, mark, hint = facts.text.partition("\nhint: ")
    return Diagnosis(remedies=(hint.strip(),)) if mark else None


_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([^'.]+)")


def missing_module(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a failed import: on all ranks it is the environment, on one it is the node."""
    if not facts.text.startswith(("ModuleNotFoundError", "ImportError")):
        return None
    same = [worker for worker in facts.workers if (worker["error"] or {}).get("message") == facts.text]
    where = (
        "on every rank"
        if len(same) == len(facts.workers) > 1
        else f"on rank {name_ranks([w['rank'] for w in same])}"
    )
    module = _NO_MODULE.match(facts.text)
    remedy = f"{facts.python} -m pip install {module[1]}" if module else f"{facts.python} -m pip check"
    return Diagnosis(
        why=f"the import fails {where}, in the environment of {facts.python}",
        remedies=(remedy, "or start fsdplaunch from the environment that has it"),
    )


_NOT_TO_WRAP = re.compile(r"could not find the transformer layer class (?:to wrap )?'?(\w+)?", re.IGNORECASE)


def wrong_block_class(facts: FailureFacts) -> Diagnosis | None:
    """Recognise that another library did not find the class to wrap; ours lists those that are there."""
    found = _NOT_TO_WRAP.search(facts.text)
    if not found:
        return None
    named = ", ".join(facts.config.fsdp_config.fsdp_transformer_layer_cls_to_wrap) if facts.config else found[1]
    return Diagnosis(
        why=f"the model has no module of the class {named or 'named'}",
        remedies=("leave fsdp_transformer_layer_cls_to_wrap out: the blocks are then found by themselves",),
    )


def no_bf16(facts: FailureFacts) -> Diagnosis | None:
    """Recognise hardware without the dtype."""
    if not re.search(r"bf16|bfloat16", facts.text, re.I) or not re.search(
        r"not support|unsupported|cannot compute|not implemented", facts.text, re.I
    ):
        return None
    return Diagnosis(why="the hardware or the operation does not know bf16", remedies=("--mixed-precision fp16",))


def too_few_gpus(facts: FailureFacts) -> Diagnosis | None:
    """Recognise that a rank was given a GPU that is not there."""
    if "invalid device ordinal" not in facts.text:
        return None
    return Diagnosis(
        why="the rank's number is higher than that of the last visible GPU",
        remedies=("fewer workers; under SLURM, GPUs per node and not per task", "unset CUDA_VISIBLE_DEVICES"),
    )


_NEEDS_GPU = re.compile(
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
    r"|no CUDA-capable device|_cuda_\w+'|only supported with GPUs|doesn't have NCCL built in"
    r"|on a CUDA device but torch\.cuda\.is_available\(\) is False|device string: None"
    r"|Cannot access accelerator device when none is available"
    r"|\b(?:needs?|requires?) (?:a |an )?(?:NVIDIA )?(?:CUDA|GPU)\b(?! with| [\d.])"
    r"|CUDA is(?: not |n't | un)available",
    re.IGNORECASE,
)
"""What torch's builds with and without CUDA say where there is no GPU, and what scripts say that ask before."""
_ASSERTS_GPU = re.compile(r"^\s*assert\b.*\b(cuda|accelerator)\.(is_available|device_count)\(\)", re.MULTILINE)


def needs_a_gpu(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a script that asks for a GPU where there is none, as many do as soon as RANK is set."""
    if not (_NEEDS_GPU.search(facts.text) or _asserts_a_gpu(facts)):
        return None
    hidden = facts.config is not None and facts.config.launch.hide_ranks
    hide = "--hide-ranks (launch.hide_ranks), if it does so for RANK is set: it then takes its way for one process"
    own = "the script's own option for the CPU, such as --device cpu, if it has one"
    return Diagnosis(
        why="the script asks for a GPU, and its workers run on the CPU", remedies=(own,) if hidden else (hide, own)
    )


def _asserts_a_gpu(facts: FailureFacts) -> bool:
    """Return whether the line that failed is `assert torch.cuda.is_available()`, which has no message."""
    traceback = (facts.cause["error"] or {}).get("traceback") or ""
    return facts.text.startswith("AssertionError") and _ASSERTS_GPU.search(traceback) is not None


def native_crash(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a crash in compiled code, whose stack faulthandler has written."""
    if facts.died_of not in ("SIGSEGV", "SIGILL", "SIGFPE", "SIGABRT") or is_consequence(facts.cause):
        return None
    return Diagnosis(
        why=f"compiled code crashed ({facts.died_of})",
        remedies=("the Python lines it was called from are in the log, below 'Fatal Python error'",),
    )


def left_by_itself(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a script that ended itself with a status, without an exception."""
    error, code = facts.cause["error"], facts.cause["code"]
    if error is None and code is not None and code > 0:
        return Diagnosis(why=f"it left with status {code} and no exception: os._exit, or a program it became")
    if error is None or not (error["message"] or "").startswith("SystemExit"):
        return None
    asked = error["message"].partition(": ")[2]
    return Diagnosis(why=f"the script itself ended the run: sys.exit({asked})")


def never_sharded(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a script that trained without sharding."""
    if "ended without sharding a model" not in facts.text:
        return None
    return Diagnosis(
        why="each worker would have trained a replica of its own",
        remedies=("call fsdplaunch.prepare(model, ...) in the script", "--allow-unsharded, if that is meant"),
    )


__all__ = ["Diagnosis", "FailureFacts", "diagnose"]

_KINDS: Sequence[Callable[[FailureFacts], Diagnosis | None]] = (
    own_hint,
    never_sharded,
    gpu_out_of_memory,
    host_out_of_memory,
    bus_error,
    unequal_collectives,
    collective_timeout,
    port_in_use,
    lost_connection,
    killed_from_outside,
    native_crash,
    missing_module,
    wrong_block_class,
    no_bf16,
    too_few_gpus,
    needs_a_gpu,
    disk_full,
    left_by_itself,
)
"""In this order: the first that recognises the failure speaks."""


def diagnose(facts: FailureFacts) -> Diagnosis:
    """Return what can be said about a failure; nothing when no function recognises it."""
    for recognise in _KINDS:
        found = recognise(facts)
        if found is not None:
            return found
    return Diagnosis()
