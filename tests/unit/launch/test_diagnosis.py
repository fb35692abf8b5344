"""What is said about each kind of failure."""

import pytest

from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config, FsdpConfig
from fsdplaunch.config.schema.launch_sections import LaunchSection
from fsdplaunch.launch.diagnosis import Diagnosis, FailureFacts, diagnose, diagnose_record
from fsdplaunch.launch.root_cause import first_failure

OOM = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.25 GiB of"
    " which 1.12 GiB is free. Including non-PyTorch memory, this process has 78.10 GiB memory in use. Of the"
    " allocated memory 76.00 GiB is allocated by PyTorch"
)
GLOO_TIMEOUT = "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation to complete"
NCCL_TIMEOUT = (
    "DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE,"
    " Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)


def nccl(said: str) -> str:
    """What torch makes of an error of NCCL's."""
    return (
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error (run with"
        " NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call failed.\n"
        f"Last error:\n{said}"
    )


def cuda(said: str) -> str:
    return f"AcceleratorError: CUDA error: {said}\nCUDA kernel errors might be asynchronously reported"


def seen(*workers, config=Config(), **more) -> Diagnosis:  # noqa: B008  (it is frozen)
    about = {"config": resolve(config), "python": "/env/python", **more}
    return diagnose(FailureFacts(cause=workers[0], workers=workers, **about))


def test_gpu_memory_names_what_was_wanted_and_keys_that_are_not_in_use(worker):
    found = seen(worker(message=OOM))
    assert found.why == "of the GPU's 79.25 GiB only 1.12 GiB were free, and 2.00 GiB were wanted"
    saving = ("--fsdp-activation-checkpointing true", "--mixed-precision bf16", "a smaller batch")
    assert found.remedies[:3] == saving
    thrifty = Config(
        mixed_precision="bf16",
        fsdp_config=FsdpConfig(fsdp_activation_checkpointing=True, fsdp_sharding_strategy="SHARD_GRAD_OP"),
    )
    assert seen(worker(message=OOM), config=thrifty).remedies == (
        "--fsdp-sharding-strategy FULL_SHARD",
        "a smaller batch",
        "--fsdp-offload-params true (slower)",
    )


def test_gpu_memory_that_another_process_holds_or_that_is_in_pieces_is_named(worker):
    text = OOM + ". Process 4242 has 30.00 GiB memory in use, and 4.00 GiB is reserved by PyTorch but unallocated."
    found = seen(worker(message=text))
    assert found.why.endswith(
        "; another process holds 30.00 GiB; 4.00 GiB are reserved in pieces that are too small"
    )
    assert found.remedies[0] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_rank_whose_own_gpu_failed_is_the_cause_though_nccl_says_so(worker):
    lost = worker(
        0, at=1, message="DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited"
    )
    own = worker(1, at=2, message=nccl("Cuda failure 2 'out of memory'"))
    assert first_failure([lost, own]) is own


def test_host_memory_is_told_from_the_kernels_counter(worker):
    killed = worker(code=-9, peak_bytes=31 * 2**30)
    config = Config(fsdp_config=FsdpConfig(fsdp_cpu_ram_efficient_loading=False))
    found = seen(killed, config=config, memory_kills=1, memory_limit=32 * 2**30)
    words = "the kernel killed it: the memory limit of 32.0 GiB was reached; this rank held up to 31.0 GiB"
    assert found.why == words
    assert "--fsdp-cpu-ram-efficient-loading" in found.remedies[0]
    outside = seen(killed)
    assert "something outside this run sent SIGKILL" in outside.why
    assert "dmesg" in outside.remedies[0]


def test_data_loaders_process_that_the_kernel_killed_is_told_from_its_counter(worker):
    words = "RuntimeError: DataLoader worker (pid(s) 2746) exited unexpectedly"
    found = seen(worker(message=words), memory_kills=1, memory_limit=2**30)
    assert found.why == "the kernel killed a data loader's process: the memory limit of 1.0 GiB was reached"
    assert seen(worker(message=words)).why == ""


def test_agent_that_the_kernel_killed_is_told_from_its_counter():
    record = {"killed_by": "SIGKILL", "memory_kills": 1, "memory_limit": 2**30}
    found = diagnose_record(record, Config(), python="python", folder="")
    assert found.why == "the kernel killed it: the memory limit of 1.0 GiB was reached"
    outside = diagnose_record({**record, "memory_kills": 0}, Config(), python="python", folder="")
    assert outside.why.startswith("something outside this run sent SIGKILL")
    assert diagnose_record({**record, "killed_by": "SIGSEGV"}, Config(), python="python", folder="").why == ""


def test_full_disk_of_the_runs_folder_is_named():
    found = diagnose_record({"error": "", "is_full": True}, Config(), python="python", folder="")
    assert found.why.startswith("the disk with the run's folder is full")
    assert found.remedies == ("make room there, or choose another --log-dir",)


def test_collective_timeout_names_the_ranks_that_did_not_come(worker):
    waited = worker(0, message=GLOO_TIMEOUT)
    found = seen(waited, worker(1, code=-15, sent=[15]))
    assert "in a collective for 600 s for rank 1, which did not join it" in found.why
    assert "--process-group-timeout-seconds" in found.remedies[1]
    both = seen(waited, worker(1, message=GLOO_TIMEOUT))
    assert "for the others, which did not join it" in both.why
    assert "collective" in seen(worker(0, message=NCCL_TIMEOUT)).why


@pytest.mark.parametrize(
    ("ranks", "where"), [((0, 1), "on every rank"), ((0,), "on rank 0"), ((0, 2), "on rank 0, 2")]
)
def test_missing_module_says_where(worker, ranks, where):
    text = "ModuleNotFoundError: No module named 'flash_attn.ops'"
    workers = [worker(rank, message=text if rank in ranks else None) for rank in range(max(ranks) + 1)]
    assert seen(*workers).why == f"the import fails {where}, in the environment of /env/python"


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("torhc", "did you mean torch, which exists?"),
        ("mymodel", "did you mean mymodels, which exists?"),  # beside the script
        ("cv2", "/env/python -m pip install opencv-python, which provides cv2"),
        (
            "no_such_package_at_all",
            "install the package that provides no_such_package_at_all (its name may differ)",
        ),
        (
            "json.nothing",
            "json itself exists: it may need another version, or the name below it another spelling",
        ),
    ],
)
def test_missing_module_is_explained_without_installing_what_is_called_like_it(worker, tmp_path, module, says):
    (tmp_path / "mymodels.py").touch()
    found = seen(worker(message=f"ModuleNotFoundError: No module named '{module}'"), folder=str(tmp_path))
    assert found.remedies[0].startswith(says)
    broken = worker(message="ImportError: cannot import name 'x' from 'y' (/env/y.py)")
    assert seen(broken).remedies[0] == "/env/python -m pip check"


def test_own_errors_bring_their_hint(worker):
    text = (
        "ShardingError: no module of class LlamaLayer in Tiny\nhint: did you mean Layer? classes there: 4 x Layer"
    )
    assert seen(worker(message=text)) == Diagnosis(remedies=("did you mean Layer? classes there: 4 x Layer",))
    assert seen(worker(message="ValueError: batch size must be positive")) == Diagnosis()  # it speaks for itself


def test_block_class_that_another_library_did_not_find(worker):
    config = Config(fsdp_config=FsdpConfig(fsdp_transformer_layer_cls_to_wrap=("LlamaLayer",)))
    text = "ValueError: Could not find the transformer layer class LlamaLayer in the model."
    found = seen(worker(message=text), config=config)
    assert found.why == "the model has no module of the class LlamaLayer"
    assert "leave fsdp_transformer_layer_cls_to_wrap out" in found.remedies[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "RuntimeError: [../pair.cc:547] Connection closed by peer [10.0.0.2]:3301",
            "no rank of this node says why",
        ),
        ("OSError: [Errno 98] Address already in use", "a port the run needs is held by another program"),
        ("RuntimeError: bfloat16 is not supported on this GPU", "does not support bf16"),
        ("ValueError: FSDP is enabled but the parallelism config has no dimension for FSDP to shard", "NO_SHARD"),
        ("RuntimeError: CUDA error: invalid device ordinal", "higher than that of the last visible GPU"),
        ("OSError: [Errno 28] No space left on device: 'ckpt'", "the disk is full"),
        ("SystemExit: 7", "the script itself ended the run: sys.exit(7)"),
        ("NeverShardedError: t.py ended without sharding a model", "a replica of its own"),
        ("RuntimeError: DataLoader worker is killed by signal: insufficient shared memory (shm)", "/dev/shm"),
        (nccl("Duplicate GPU detected : rank 1 and rank 0 both on 1b000"), "two ranks compute on one GPU"),
        (nccl("Bootstrap : no socket interface found"), "NCCL_SOCKET_IFNAME names none"),
        (nccl("Error while creating shared memory segment /dev/shm/nccl-x"), "(/dev/shm) is used up"),
        (nccl("Cuda failure 2 'out of memory'"), "the GPU's memory is used up"),
        (nccl("Invalid config blocking attribute value 2"), "NCCL: Invalid config blocking attribute value 2"),
        (cuda("uncorrectable ECC error encountered"), "an error that it cannot correct"),
        (cuda("an illegal memory access was encountered"), "a wrong address or index"),
        (cuda("device-side assert triggered"), "a wrong address or index"),
        (cuda("unspecified launch failure"), "the GPU or its driver has failed"),
        (cuda("no kernel image is available for execution on the device"), "no code for this GPU"),
        (cuda("CUDA driver version is insufficient for CUDA runtime"), "older than the CUDA of this torch"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", "driver is older"),
        ("RuntimeError: cudaGetDeviceCount(). Error 802: system not yet initialized", "fabric"),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess.", "a process was forked after"),
        (cuda("CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), "the GPU's memory is used up"),
        ("AssertionError: Unknown c10d backend type CPU:GLOO,CUDA:NCCL", "bound to a GPU"),
        ("RuntimeError: opts not a ProcessGroupGloo::Options", "bound to a GPU"),
        (cuda("out of memory"), "the GPU's memory is used up"),
        (cuda("GPU is lost"), "the GPU or its driver has failed"),
        ("RuntimeError: torch._scaled_mm is only supported on compute capability >= 9.0", "not compute in fp8"),
    ],
)
def test_kinds_that_a_sentence_tells(worker, text, why):
    assert why in seen(worker(message=text)).why


@pytest.mark.parametrize(
    "text",
    [
        "AssertionError: Torch not compiled with CUDA enabled",
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "RuntimeError: Expected one of cpu, cuda, ipu device type at start of device string: None",
        "AssertionError: for now we need CUDA for DDP",
        "AssertionError: CUDA is not available but cuda was specified.",
        "AssertionError",
    ],
)
def test_a_script_that_asks_for_a_gpu_on_the_cpu_is_told_of_hide_ranks_unless_it_is_set(worker, text):
    cause = worker(message=text, traceback="  File 't.py', line 9\n    assert torch.cuda.is_available()\n")
    found = seen(cause)
    assert found.why == "the script asks for a GPU, and its workers run on the CPU"
    assert found.remedies[0].startswith("--hide-ranks (launch.hide_ranks)")
    hidden = seen(cause, config=Config(launch=LaunchSection(hide_ranks=True)))
    assert hidden.why == found.why
    assert hidden.remedies == found.remedies[1:]


def test_an_error_on_a_gpu_is_no_want_of_one(worker):
    for text in ("RuntimeError: CUDA error: device-side assert triggered", "ImportError: this needs CUDA 12.4"):
        assert "on the CPU" not in seen(worker(message=text)).why


@pytest.mark.parametrize(
    ("code", "why"), [(-7, "/dev/shm"), (-11, "compiled code crashed (SIGSEGV)"), (9, "it ended with status 9")]
)
def test_ends_without_an_exception(worker, code, why):
    assert why in seen(worker(code=code)).why


UNEQUAL = (
    "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 20 vs 10."
    " Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
)


def test_ranks_in_different_collectives_are_told_from_what_gloo_says(worker):
    aborted = worker(1, code=-6, at=2.0, tail=(UNEQUAL, "Fatal Python error: Aborted"))
    lost = worker(0, message="RuntimeError: Read error [127.0.0.1]:1: Connection reset by peer")
    assert first_failure([lost, aborted]) is aborted
    found = seen(aborted, lost)
    assert found.why.startswith("ranks were in different collectives")
    assert found.remedies[0].startswith("--keep-global-batch")
    kept = seen(aborted, lost, config=Config(launch=LaunchSection(keep_global_batch=True)))
    assert len(kept.remedies) == 1
