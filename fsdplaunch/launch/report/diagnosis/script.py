"""Failures of the script, its environment and the configuration."""

import re

from fsdplaunch.launch.report.diagnosis.facts import Diagnosis, FailureFacts, name_ranks
from fsdplaunch.launch.report.root_cause import is_consequence


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
