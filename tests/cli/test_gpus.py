"""Machines whose GPUs a driver library made up for the tests shows: plan, checks, doctor, and workers."""

import json

import pytest

VISIBLE = "import os\nopen('seen', 'w').write(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))\n"


@pytest.fixture
def on(cli, gpu_driver, tmp_path):
    """Return a function that runs a command on a machine with such GPUs."""
    (tmp_path / "t.py").write_text(VISIBLE)

    def run(gpus: str, *words: str, visible: str | None = None, **more: str):
        hidden = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        unset = ("env", "-u", "CUDA_VISIBLE_DEVICES") if visible is None else ()
        return cli(*words, LD_LIBRARY_PATH=gpu_driver, FAKE_NVML=gpus, before=unset, **hidden, **more)

    return run


@pytest.mark.parametrize(
    ("gpus", "more", "workers", "noted"),
    [
        ("h100:8", {}, 8, ""),
        ("h100:8", {"FAKE_NVML_LOST": "2"}, 7, "GPU 2 does not answer: GPU is lost"),
        ("h100:8", {"visible": "4,5"}, 2, "shows 2 of this machine's 8 GPUs"),
        ("t4:1,h100:1", {}, 2, ""),
        ("h100mig:1", {}, 1, "one MIG slice, here MIG-"),
        ("h100:8", {"FAKE_NVML_INIT": "18"}, 2, "the NVIDIA driver does not answer: "),
    ],
)
def test_plan_is_made_for_the_gpus_that_a_process_sees(on, gpus, more, workers, noted):
    plan = json.loads(on(gpus, "launch", "--dry-run", "--json", "t.py", **more).stdout)
    assert plan["workers"] == workers
    assert plan["env"]["FSDPLAUNCH_DEVICE"] == plan["device"] == ("cpu" if "FAKE_NVML_INIT" in more else "cuda")
    assert any(noted in note for note in plan["notes"]) or not noted


@pytest.mark.parametrize(
    ("gpus", "words", "said"),
    [
        ("t4:2", ("--mixed-precision", "bf16"), "GPU 0 (Tesla T4) cannot compute in bf16"),
        ("a100:2", ("--mixed-precision", "fp8"), "GPU 0 (NVIDIA A100-SXM4-80GB) cannot compute in fp8"),
        ("h100mig:1", ("--num-processes", "2"), "asks for 2 workers on this node, but it has 1 visible GPU"),
        ("h100:2", ("--gpu-ids", "2"), "gpu_ids names GPU 2, and this node shows 0, 1"),
        ("h100:2", ("--gpu-ids", "GPU-0"), "gpu_ids names GPU-0, which is not visible here"),
        ("h100:8,18", ("--num-processes", "8"), "the NVIDIA driver does not answer: RM has detected"),
    ],
)
def test_gpus_that_cannot_do_it_are_refused_before_anything_starts(on, gpus, words, said):
    gpus, _, driver = gpus.partition(",")
    done = on(gpus, "launch", "--check-only", *words, "t.py", **({"FAKE_NVML_INIT": driver} if driver else {}))
    assert (done.returncode, said in done.stderr) == (3, True), done.stderr


@pytest.fixture
def cpu_torch():
    """Skips where torch has CUDA."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch has CUDA")
    return torch.__version__


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "t.py"),
        ("launch", "--distributed-type", "MULTI_GPU", "t.py"),
        ("launch", "--check-only", "t.py"),
        ("tune", "t.py"),
    ],
    ids=["launch", "replicas", "check only", "tune"],
)
def test_torch_for_the_cpu_beside_gpus_ends_what_would_train_with_3_before_it_starts(
    on, tmp_path, cpu_torch, words
):
    done = on("h100:2", *words)
    assert done.returncode == 3, done.stderr
    assert f"this machine has GPUs, and torch {cpu_torch} is built for the CPU" in done.stderr
    assert not (tmp_path / "seen").exists()


def test_worker_whose_torch_cannot_use_the_planned_gpus_ends_with_3_and_torchs_reason(on, tmp_path, cpu_torch):
    # What is planned without a look at torch's build: the program's own torch may be another one.
    done = on("h100:2", "launch", "--no-python", "python", "-m", "fsdplaunch.runtime.bootstrap", "t.py")
    assert done.returncode == 3, done.stderr
    assert f"torch {cpu_torch} cannot use them: Torch not compiled with CUDA enabled" in done.stderr
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "--cpu", "--num-processes", "1", "--allow-unsharded", "t.py"),
        ("check", "--steps", "1", "t.py"),
        ("check", "--compare", "t.py"),
    ],
    ids=["launch", "check", "compare"],
)
def test_runs_on_the_cpu_see_no_gpu(on, tmp_path, cpu_torch, words):
    done = on("h100:2", *words)
    # The script makes no step, which check says of it.
    assert done.returncode == (words[0] == "check"), done.stderr
    assert (tmp_path / "seen").read_text() == "''"


@pytest.mark.parametrize(
    ("gpus", "more", "lines", "memory"),
    [
        ("h100:8", {}, ("num_processes: 8", "mixed_precision: bf16"), 85_520_809_984),
        ("h100:8", {"FAKE_NVML_LOST": "2"}, ("num_processes: 7", "mixed_precision: bf16"), 85_520_809_984),
        ("h100:8", {"visible": "4,5"}, ("num_processes: 2", "mixed_precision: bf16"), 85_520_809_984),
        ("t4:1,h100:1", {}, ("num_processes: 2", "mixed_precision: 'no'"), 15_843_721_216),
        ("h100mig:1", {}, ("num_processes: 1", "mixed_precision: bf16"), 42_140_172_288),
        ("h100:8", {"FAKE_NVML_INIT": "9"}, ("num_processes: 2", "use_cpu: true"), None),
    ],
    ids=["8 GPUs", "a lost one", "two visible", "unlike", "a slice", "none"],
)
def test_wizard_and_estimate_take_what_a_worker_would_see(on, tmp_path, gpus, more, lines, memory):
    done = on(gpus, "config", "--yes", **more)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "fsdp.yaml").read_text().splitlines()
    assert all(any(line.startswith(wanted) for line in written) for wanted in lines), written
    found = json.loads(on(gpus, "estimate", "1b", "--json", **more).stdout)
    assert (found["gpu_memory"], found["setup"]["world"]) == (memory, int(lines[0].split()[-1]))


@pytest.mark.parametrize(
    ("gpus", "more", "said"),
    [
        ("h100:4", {}, "all pairs read each other's memory"),
        ("h100:4", {"FAKE_NVML_NOP2P": "1"}, "6 of 6 pairs go through host memory, for example GPU 0 and 1"),
        ("h100:4", {"FAKE_NVML_ECC": "7"}, "GPU 2 has 7 uncorrected memory errors"),
        ("t4:1,h100:1", {}, "different GPUs: 1 x Tesla T4"),
        ("h100mig:1", {}, "one MIG slice"),
        ("h100:8", {"FAKE_NVML_ECC": "7", "visible": "4,5"}, "2 x NVIDIA H100"),  # those that are visible alone
    ],
)
def test_doctor_looks_at_several_gpus(on, gpus, more, said):
    done = on(gpus, "doctor", "--no-torch", **more)
    assert said in done.stdout, done.stdout + done.stderr
    assert "memory errors" not in done.stdout or "visible" not in more


def test_doctor_finds_a_driver_that_does_not_answer(on):
    done = on("h100:2", "doctor", "--no-torch", FAKE_NVML_INIT="18")
    assert done.returncode == 3, done.stdout
    assert "problem  driver      the NVIDIA driver does not answer: RM has detected" in done.stdout
    assert done.stdout.count("does not answer") == 1


def test_doctor_finds_gpus_that_torch_cannot_use(on):
    done = on("h100:2", "doctor")
    assert done.returncode == 3, done.stdout
    assert "built without CUDA" in done.stdout or "torch can use 0" in done.stdout
