"""Which warm interpreter fits a launch: the name it listens under, and the variables that have a say in imports.

Two kinds of variables count. Those with the prefixes below are read by native code, or before any line of ours
runs; they are part of the name. What Python code reads while it is imported is noted at that time, variable by
variable, and compared when a launch comes.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence

from fsdplaunch import __version__

PROTOCOL = 3
_PREFIXES = (
    # the loader, the interpreter, the C library, the locale
    *("LD_", "PYTHON", "COVERAGE_", "SETUPTOOLS_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ"),
    # threads and arithmetic
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "NPY_", "DNNL_", "ONEDNN_"),
    # torch
    *("TORCH", "PYTORCH", "ATEN_", "CAFFE2_", "KINETO_", "TRITON_", "XLA_", "PJRT_"),
    # devices
    *("CUDA_", "NVIDIA_", "CUBLAS", "CUDNN", "NVTX_", "HIP_", "HSA_", "ROC", "AMD_", "ZE_", "SYCL_", "ONEAPI_"),
    # the network
    *("NCCL_", "RCCL_", "GLOO_", "UCC_", "UCX_", "FI_"),
    # checkers and profilers
    *("ASAN_", "LSAN_", "TSAN_", "UBSAN_"),
)
_PER_RUN = ("TORCHELASTIC_", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Of those, what differs from run to run and is read only while one runs."""
_WITHOUT_SAY = ("FSDPLAUNCH_", "PWD", "OLDPWD", "SHLVL", "_")


def native_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that native code may read before, or while, it is loaded."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) and not name.startswith(_PER_RUN)
    }


def has_say(name: str) -> bool:
    """Return whether a variable counts that Python code was seen to read while it was imported."""
    return not name.startswith(_WITHOUT_SAY[0]) and name not in _WITHOUT_SAY and not name.startswith(_PER_RUN)


def server_name(python: str, modules: Sequence[Sequence[str]], environ: Mapping[str, str], *, folder: str) -> str:
    """Return the name under which a warm interpreter for such launches listens.

    Args:
        python: The interpreter.
        modules: What is imported before the fork server is forked, and in it.
        environ: The agent's variables.
        folder: The current folder, which counts where PYTHONPATH has relative entries.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    is_relative = bool(environ.get("PYTHONPATH")) and not all(map(os.path.isabs, entries))
    found = os.stat(python)  # noqa: PTH116  (of the file behind the links)
    text = json.dumps(
        [
            *(PROTOCOL, __version__, python, found.st_mtime_ns, found.st_size),
            *(list(map(list, modules)), native_variables(environ), folder if is_relative else ""),
        ]
    )
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:20]
