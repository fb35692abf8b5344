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
    ],
)
def test_gpus_that_cannot_do_it_are_refused_before_anything_starts(on, gpus, words, said):
    done = on(gpus, "launch", "--check-only", *words, "t.py")
    assert (done.returncode, said in done.stderr) == (3, True), done.stderr


def test_torch_that_cannot_use_the_gpus_ends_the_run_with_its_reason_and_cpu_hides_them(on, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("this torch has CUDA")
    done = on("h100:2", "launch", "t.py")
    assert done.returncode == 3, done.stderr
    assert "torch cannot use" not in done.stdout
    assert "cannot use them: Torch not compiled with CUDA enabled" in done.stderr
    assert not (tmp_path / "seen").exists()
    done = on("h100:2", "launch", "--cpu", "--num-processes", "1", "--allow-unsharded", "t.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text() == "''"


@pytest.mark.parametrize(
    ("gpus", "more", "said"),
    [
        ("h100:4", {}, "all pairs read each other's memory"),
        ("h100:4", {"FAKE_NVML_NOP2P": "1"}, "6 of 6 pairs go through host memory, GPU 0 and 1 first"),
        ("h100:4", {"FAKE_NVML_ECC": "7"}, "GPU 2 has 7 uncorrected memory errors"),
        ("t4:1,h100:1", {}, "unlike GPUs: 1 x Tesla T4"),
        ("h100mig:1", {}, "one MIG slice"),
        ("h100:8", {"FAKE_NVML_ECC": "7", "visible": "4,5"}, "2 x NVIDIA H100"),  # those that are visible alone
    ],
)
def test_doctor_looks_at_several_gpus(on, gpus, more, said):
    done = on(gpus, "doctor", "--no-torch", **more)
    assert said in done.stdout, done.stdout + done.stderr
    assert "memory errors" not in done.stdout or "visible" not in more


def test_doctor_finds_gpus_that_torch_cannot_use(on):
    done = on("h100:2", "doctor")
    assert done.returncode == 3, done.stdout
    assert "built without CUDA" in done.stdout or "torch can use 0" in done.stdout
