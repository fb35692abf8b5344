"""Why a run failed and what to try, from what is recorded: one row or small function per kind of failure."""

import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdplaunch.config.names import closest
from fsdplaunch.config.schema.config import Config
from fsdplaunch.display_text import GIB, listed
from fsdplaunch.launch.root_cause import UNEQUAL_COLLECTIVES, Worker, has_failed, is_consequence, own_signal

_SIZE = r"([\d.]+ [KMGT]iB)"
_TIMEOUT = re.compile(
    r"Timed out waiting|Watchdog caught collective operation timeout|Collective .* timed? ?out|Wait timeout", re.I
)
_NO_GPU_MEMORY = re.compile(
    r"CUDA out of memory|OutOfMemoryError|Cuda failure \d* ?'out of memory'"
    r"|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDA error: out of memory"
)
"""Of torch; of NCCL, which needs buffers of its own; of cuBLAS, where there is no room for its workspace."""
_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([^'.]+)")
_PACKAGES = {"cv2": "opencv-python", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""What to install for a module that is not called as its package is. Of others only their own pages know."""
_NEEDS_GPU = re.compile(
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
    r"|no CUDA-capable device|_cuda_\w+'|only supported with GPUs|doesn't have NCCL built in"
    r"|on a CUDA device but torch\.cuda\.is_available\(\) is False|device string: None"
    r"|Cannot access accelerator device when none is available"
    r"|\b(?:needs?|requires?) (?:a |an )?(?:NVIDIA )?(?:CUDA|GPU)\b(?! with| [\d.])"
    r"|CUDA is(?: not |n't | un)available",
    re.I,
)
"""What torch's builds with and without CUDA say where there is no GPU, and what scripts say that ask before."""
_ASSERTS_GPU = re.compile(r"^\s*assert\b.*\b(cuda|accelerator)\.(is_available|device_count)\(\)", re.MULTILINE)
_LOADER_ENDED = re.compile(r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal: Killed)")
_NEVER = r"(?!)"
_MORE_MEMORY = "more host memory, or fewer data loader workers"
_SENT = "something outside this run sent SIGNAL: a user, a scheduler, or the kernel of a node without memory"
_SAME_CALLS = "check that every rank makes the same calls, evaluation and saving included"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is said about a failure."""

    why: str = ""  # the reason, in one sentence; empty when the exception says it all
    remedies: tuple[str, ...] = ()  # what to try, the best first


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFacts:
    """What is known about a failed attempt."""

    cause: Worker
    workers: Sequence[Worker]
    config: Config
    memory_kills: int = 0  # how often the kernel killed a process of this job for want of memory, while it ran
    memory_limit: int | None = None  # host memory the job may use, in bytes; None when unknown
    python: str = "python"  # the interpreter the workers ran in
    folder: str = ""  # the script's

    @property
    def text(self) -> str:
        """Return the exception, or else the last lines of the error output."""
        error = self.cause["error"]
        return (error["message"] or "") if error else "\n".join(self.cause["tail"])

    @property
    def died_of(self) -> str:
        """Return the signal that killed the worker, or nothing; not one that the launcher sent."""
        return own_signal(self.cause) or ""


_Recognise = Callable[[FailureFacts], Diagnosis | None]


def diagnose(facts: FailureFacts) -> Diagnosis:
    """Return what can be said about a failure; nothing when no function recognizes it."""
    return next((found for recognise in _KINDS if (found := recognise(facts)) is not None), Diagnosis())


def diagnose_record(record: Mapping[str, Any], config: Config, *, python: str, folder: str) -> Diagnosis:
    """Return what can be said about the last attempt that an agent has recorded; nothing when no worker failed."""
    attempts = record.get("attempts") or []
    if killed_by := record.get("killed_by"):
        return _agent_killed(killed_by, record.get("memory_kills") or 0, record.get("memory_limit"))
    if record.get("is_full"):
        why = "the disk with the run's folder is full: what its ranks print and how they end cannot be written"
        return Diagnosis(why=why, remedies=("make room there, or choose another --log-dir",))
    if not attempts or attempts[-1]["cause"] is None:
        return Diagnosis()
    facts = FailureFacts(
        cause=attempts[-1]["cause"],
        workers=attempts[-1]["workers"],
        config=config,
        memory_kills=record.get("memory_kills") or 0,
        memory_limit=record.get("memory_limit"),
        python=python,
        folder=folder,
    )
    return diagnose(facts)


def _says(pattern: str, why: str, *remedies: str, died_of: Sequence[str] = ()) -> _Recognise:
    """Recognize a failure by its text, or by the signal that killed the worker, which `why` names as SIGNAL."""
    compiled = re.compile(pattern, re.I | re.S)

    def recognise(facts: FailureFacts) -> Diagnosis | None:
        if not compiled.search(facts.text) and facts.died_of not in died_of:
            return None
        return Diagnosis(why=why.replace("SIGNAL", facts.died_of), remedies=remedies)

    return recognise


def _own_hint(facts: FailureFacts) -> Diagnosis | None:
    _, mark, hint = facts.text.partition("\nhint: ")
    return Diagnosis(remedies=(hint.strip(),)) if mark else None


def _gpu_out_of_memory(facts: FailureFacts) -> Diagnosis | None:
    if not _NO_GPU_MEMORY.search(facts.text):
        return None

    def size(words: str) -> str:
        found = re.search(words, facts.text)
        return found[1] if found else ""

    asked, total = size(rf"Tried to allocate {_SIZE}"), size(rf"total capacity of {_SIZE}")
    free, others = size(rf"of which {_SIZE} is free"), size(rf"Process \d+ has {_SIZE} memory in use")
    why = "the GPU's memory is used up"
    if total and free:
        why = f"of the GPU's {total} only {free} were free"
        why += f", and {asked} were wanted" if asked else ""
    if others:
        why += f"; another process holds {others}"
    remedies = _savings(facts.config)
    unused = size(rf"{_SIZE} is reserved by PyTorch but unallocated")
    if unused and asked and _bytes(unused) >= _bytes(asked):
        why += f"; {unused} are reserved in pieces that are too small"
        remedies.insert(0, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return Diagnosis(why=why, remedies=tuple(remedies))


def _bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * float(1024 ** " KMGT".index(unit[0]))


def _savings(config: Config) -> list[str]:
    if config.distributed_type != "FSDP":
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


def _agent_killed(by: str, memory_kills: int, memory_limit: int | None) -> Diagnosis:
    """Say why an agent was killed: it could not say so itself."""
    if by == "SIGKILL" and memory_kills:
        why = f"the kernel killed it: the memory limit{_of(memory_limit)} was reached"
        return Diagnosis(why=why, remedies=(_MORE_MEMORY,))
    return Diagnosis(why=_SENT.replace("SIGNAL", by)) if by in ("SIGKILL", "SIGTERM") else Diagnosis()


def _of(memory_limit: int | None) -> str:
    return f" of {memory_limit / GIB:.1f} GiB" if memory_limit else ""


def _loader_out_of_memory(facts: FailureFacts) -> Diagnosis | None:
    """Recognize a loader's process that the kernel killed: its worker hears of the end, and not of the signal."""
    if not facts.memory_kills or not _LOADER_ENDED.search(facts.text):
        return None
    why = f"the kernel killed a data loader's process: the memory limit{_of(facts.memory_limit)} was reached"
    return Diagnosis(why=why, remedies=(_MORE_MEMORY,))


def _host_out_of_memory(facts: FailureFacts) -> Diagnosis | None:
    if facts.died_of != "SIGKILL" or not facts.memory_kills:
        return None
    limit = _of(facts.memory_limit)
    peak = facts.cause["peak_bytes"]
    held = f"; this rank held up to {peak / GIB:.1f} GiB" if peak else ""
    remedies = [_MORE_MEMORY]
    if not facts.config.fsdp_config.fsdp_cpu_ram_efficient_loading:
        remedies.insert(0, "--fsdp-cpu-ram-efficient-loading true, so that only rank 0 loads the full model")
    remedies.append('if each rank builds the whole model: with torch.device("meta"), and fsdplaunch.prepare')
    why = f"the kernel killed it: the memory limit{limit} was reached{held}"
    return Diagnosis(why=why, remedies=tuple(remedies))


def _unequal_collectives(facts: FailureFacts) -> Diagnosis | None:
    if UNEQUAL_COLLECTIVES not in facts.text:
        return None
    alike = "--keep-global-batch, if the script branches on random numbers: all ranks then draw the same"
    return Diagnosis(
        why="ranks were in different collectives: one called or trained a model where another did not",
        remedies=(_SAME_CALLS,) if facts.config.launch.keep_global_batch else (alike, _SAME_CALLS),
    )


def _collective_timeout(facts: FailureFacts) -> Diagnosis | None:
    if not _TIMEOUT.search(facts.text):
        return None
    waited = {worker["rank"] for worker in facts.workers if has_failed(worker) and is_consequence(worker)}
    missing = [worker["rank"] for worker in facts.workers if worker["rank"] not in waited]
    seconds = facts.config.launch.process_group_timeout_seconds
    who = f"rank {_ranks(missing)}, which did not join it" if missing else "the others, which did not join it"
    longer = "--process-group-timeout-seconds with a larger number, if one rank is meant to take long"
    return Diagnosis(
        why=f"it waited in a collective for {seconds:.0f} s for {who}: ranks took different paths, or one is slow",
        remedies=(_SAME_CALLS, longer),
    )


def _lost_connection(facts: FailureFacts) -> Diagnosis | None:
    why = "the connection to another rank broke, and no rank of this node says why"
    remedy = "look at the other nodes' logs; on one node, at every rank's stderr.log"
    return Diagnosis(why=why, remedies=(remedy,)) if is_consequence(facts.cause) else None


def _nccl_error(facts: FailureFacts) -> Diagnosis | None:
    found = re.search(r"Last error:\s*(\S[^\n]*)", facts.text)
    if not found:
        return None
    return Diagnosis(why=f"NCCL: {found[1].strip()}", remedies=("NCCL_DEBUG=INFO, and every rank's stderr.log",))


def _missing_module(facts: FailureFacts) -> Diagnosis | None:
    if not facts.text.startswith(("ModuleNotFoundError", "ImportError")):
        return None
    same = [w["rank"] for w in facts.workers if (w["error"] or {}).get("message") == facts.text]
    where = "on every rank" if len(same) == len(facts.workers) > 1 else f"on rank {_ranks(same)}"
    why, found = f"the import fails {where}, in the environment of {facts.python}", _NO_MODULE.match(facts.text)
    known = sorted(module.name for module in pkgutil.iter_modules([facts.folder or ".", *sys.path]))
    name = found[1] if found else ""
    first = f"install the package that provides {name} (its name may differ), or correct the path to it"
    if not name or name in _PACKAGES:
        first = f"{facts.python} -m pip " + (
            f"install {_PACKAGES[name]}, which provides {name}" if name else "check"
        )
    elif name in known:
        first = f"{name} itself exists: it may need another version, or the name below it another spelling"
    elif near := closest(name, known):
        first = f"did you mean {near[0]}, which exists?"
    return Diagnosis(why=why, remedies=(first, "start fsdplaunch from the environment that has it"))


def _wrong_block_class(facts: FailureFacts) -> Diagnosis | None:
    if "could not find the transformer layer class" not in facts.text.lower():
        return None
    named = ", ".join(facts.config.fsdp_config.fsdp_transformer_layer_cls_to_wrap)
    return Diagnosis(
        why=f"the model has no module of the class {named or 'named'}",
        remedies=("leave fsdp_transformer_layer_cls_to_wrap out: the blocks are then found without it",),
    )


def _needs_a_gpu(facts: FailureFacts) -> Diagnosis | None:
    traceback = (facts.cause["error"] or {}).get("traceback") or ""  # an assertion may have no message
    asserts = facts.text.startswith("AssertionError") and _ASSERTS_GPU.search(traceback)
    if not (_NEEDS_GPU.search(facts.text) or asserts):
        return None
    hide = "--hide-ranks (launch.hide_ranks), if it does so because RANK is set: it then runs as one process"
    own = "the script's own option for the CPU, such as --device cpu, if it has one"
    why = "the script asks for a GPU, and its workers run on the CPU"
    return Diagnosis(why=why, remedies=(own,) if facts.config.launch.hide_ranks else (hide, own))


def _left_by_itself(facts: FailureFacts) -> Diagnosis | None:
    error, code = facts.cause["error"], facts.cause["code"]
    if error is None and code is not None and code > 0:
        return Diagnosis(
            why=f"it ended with status {code} and no exception: os._exit, or another program in its place"
        )
    if error is None or not (error["message"] or "").startswith("SystemExit"):
        return None
    asked = error["message"].partition(": ")[2]
    return Diagnosis(why=f"the script itself ended the run: sys.exit({asked})")


def _ranks(ranks: Sequence[int]) -> str:
    return listed(list(map(str, ranks)), 8)


_KINDS: Sequence[_Recognise] = (
    _own_hint,
    _says(
        "ended without sharding a model",
        "each worker would have trained a replica of its own",
        "call fsdplaunch.prepare(model, ...) in the script",
        "--allow-unsharded, if that is meant",
    ),
    _gpu_out_of_memory,
    _host_out_of_memory,
    _loader_out_of_memory,
    _says(
        "insufficient shared memory|creating shared memory segment",
        "shared memory (/dev/shm) is used up, which data loaders and NCCL pass data through",
        "fewer data loader workers",
        "a larger /dev/shm (docker run --shm-size=8g)",
        died_of=("SIGBUS",),  # nearly always
    ),
    _says(
        "duplicate GPU detected",
        "two ranks compute on one GPU: the script does not choose it by LOCAL_RANK",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything is on a GPU',
        "no more workers on a node than it has GPUs",
    ),
    _says(
        "no socket interface found",
        "NCCL found no network interface: NCCL_SOCKET_IFNAME names none that is up here",
        "unset NCCL_SOCKET_IFNAME, or --network-interface with one that fsdplaunch doctor lists",
    ),
    _says(
        "uncorrectable ECC error",
        "the GPU's memory has an error that it cannot correct",
        "leave this GPU out (gpu_ids), and reset or replace it: nvidia-smi -q -d ECC",
    ),
    _says(
        "illegal memory access|device-side assert triggered",
        "a kernel on the GPU used a wrong address or index, such as a token beyond the embedding's size",
        "CUDA_LAUNCH_BLOCKING=1, which shows the line; --cpu, which names the index",
    ),
    _says(
        r"\bXid\b|fallen off the bus|GPU is lost|unspecified launch failure",
        "the GPU or its driver has failed",
        "as root: dmesg | grep Xid; then reset the GPU, or leave it out (gpu_ids)",
    ),
    _says(
        "no kernel image is available",
        "this build of torch has no code for this GPU, or an extension was compiled for another one",
        "install a build of torch for it: fsdplaunch doctor names both",
    ),
    _says(
        "driver on your system is too old|driver version is insufficient",
        "the NVIDIA driver is older than the CUDA of this torch needs",
        "install a newer driver, or a torch that was built for an older CUDA: fsdplaunch doctor names both",
    ),
    _says(
        "system not yet initialized|Error 802",
        "the NVSwitches between the GPUs are not set up: the fabric manager does not run",
        "as root: systemctl start nvidia-fabricmanager (of the driver's own version)",
    ),
    _says(
        "Cannot re-initialize CUDA in forked subprocess",
        "a process was forked after CUDA had been used, and cannot use it itself",
        "multiprocessing_context='spawn' for data loaders that use the GPU; no CUDA before a fork",
        "--no-preload, if a module of launch.preload uses CUDA when it is imported",
    ),
    _says(
        r"(_scaled_mm|fp8).*(compute capability|only supported|requires)|float8.*not supported",
        "this GPU does not compute in fp8",
        "--mixed-precision bf16",
    ),
    _says(
        r"Unknown c10d backend type|ProcessGroupGloo::Options",
        "torch 2.9 and older cannot make a mesh, or other groups, once the process group is bound to a GPU",
        "leave device_id out of the script's init_process_group, or install a newer torch",
    ),
    _unequal_collectives,
    _collective_timeout,
    _says(
        "Address already in use|EADDRINUSE",
        "a port the run needs is held by another program",
        "leave main_process_port out to take a free one",
        "see who holds it: ss -ltnp",
    ),
    _nccl_error,
    _lost_connection,
    _says(
        _NEVER,
        _SENT,
        "the scheduler's log; as root: dmesg | grep -i 'killed process'",
        died_of=("SIGKILL", "SIGTERM"),
    ),
    _says(
        _NEVER,
        "compiled code crashed (SIGNAL)",
        "the Python lines it was called from are in the log, below 'Fatal Python error'",
        died_of=("SIGSEGV", "SIGILL", "SIGFPE", "SIGABRT"),
    ),
    _missing_module,
    _wrong_block_class,
    _says(
        "^(?=.*(bf16|bfloat16))(?=.*(not support|unsupported|cannot compute|not implemented))",
        "the hardware or the operation does not support bf16",
        "--mixed-precision fp16",
    ),
    _says(
        "no dimension for FSDP to shard",
        "accelerate's FSDP2 cannot keep a full model on every rank (NO_SHARD)",
        "--fsdp-version 1, or --distributed-type MULTI_GPU",
    ),
    _says(
        "invalid device ordinal",
        "the rank's number is higher than that of the last visible GPU",
        "fewer workers; under SLURM, GPUs per node and not per task",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    _needs_a_gpu,
    _says(
        "No space left on device|Disk quota exceeded",
        "the disk is full",
        "make room, or choose another --checkpoint.dir",
    ),
    _left_by_itself,
)
"""In this order: the first that recognizes the failure speaks."""
