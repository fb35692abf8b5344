"""Plans for PyTorch/XLA: processes, variables, refusals; nothing here has torch_xla."""

import importlib.metadata
from pathlib import Path

import pytest

from fsdplaunch.config.load import stack
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.launch import preflight
from fsdplaunch.launch.plan import LaunchTarget, NodeFacts, build_plan, check_groups
from fsdplaunch.probe.torch_version import installed_problem, problem

SPMD = "fsdp_config: {xla: true, xla_v2: true}\n"
ONE_EACH = "fsdp_config: {xla: true, xla_fsdp_settings: {compute_dtype: bf16}}\n"


def config_of(text):
    return stack(read_text(text, "x.yaml")).config


def plan_of(text, *, chips=0, environ=None):
    facts = NodeFacts(gpus=["0", "1"], cpus=8, tpu_chips=chips, environ=environ or {})
    target = LaunchTarget(name="t.py")
    return build_plan(config_of(text), node=facts, target=target, run_id="r", run_dir=Path("/runs/r"))


def xla_env(plan):
    return {name: plan.env.get(name) for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}


@pytest.mark.parametrize(
    ("text", "chips", "environ", "workers", "env"),
    [
        (SPMD, 0, {}, 1, ("CPU", "2")),
        (SPMD + "xla: {cpu_devices: 3}\nnum_processes: 4\n", 0, {}, 1, ("CPU", "3")),
        (SPMD, 0, {"CPU_NUM_DEVICES": "6"}, 1, ("CPU", "6")),
        (SPMD, 4, {}, 1, ("TPU", None)),
        (SPMD + "use_cpu: true\n", 4, {"PJRT_DEVICE": "TPU"}, 1, ("CPU", "2")),
        (ONE_EACH, 0, {}, 1, ("CPU", "1")),
        (ONE_EACH, 4, {}, 4, ("TPU", None)),
        (ONE_EACH + "xla: {processes_per_host: 2}\n", 4, {}, 2, ("TPU", None)),
        (ONE_EACH + "xla: {num_processes: 2}\n", 4, {}, 2, ("TPU", None)),
        (ONE_EACH, 4, {"PJRT_DEVICE": "TPU"}, 4, (None, None)),
        ("distributed_type: TPU\n", 4, {}, 4, ("TPU", None)),
        (ONE_EACH + "num_machines: 2\nmain_process_ip: 10.0.0.1\nmachine_rank: 1\n", 4, {}, 4, ("TPU", None)),
    ],
)
def test_processes_and_devices(text, chips, environ, workers, env):
    plan = plan_of(text, chips=chips, environ=environ)
    assert (plan.device, plan.gpus, plan.workers) == ("xla", (), workers)
    assert tuple(xla_env(plan).values()) == env


def test_a_host_without_tpu_runs_on_its_cpu_and_says_so():
    assert "no TPU is attached: running PyTorch/XLA on CPU" in plan_of(SPMD).notes
    assert not plan_of(SPMD, chips=4).notes
    assert not plan_of(SPMD + "use_cpu: true\n").notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ONE_EACH + "xla: {processes_per_host: 2}\n", "cannot join 2 processes"),
        (SPMD + "num_machines: 2\nmain_process_ip: h\nmachine_rank: 0\n", "cannot join 2 nodes"),
    ],
)
def test_a_cpu_never_trains_several_models(text, said):
    with pytest.raises(MachineError, match=said):
        plan_of(text)


def test_accelerate_is_told_neither_of_fsdp_nor_of_a_cpu():
    env = plan_of(SPMD + "use_cpu: true\nmixed_precision: bf16\n").env
    assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_CPU", "ACCELERATE_USE_PARALLELISM_CONFIG"} & set(env)
    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert env["FSDPLAUNCH_FSDP_CONFIG_XLA"] == env["FSDPLAUNCH_FSDP_CONFIG_XLA_FSDP_V2"] == "true"


AUTO_WRAP = ("fsdp_config.fsdp_auto_wrap_policy=",)
"""Of transformers' own command line."""
TPU_BF16 = "distributed_type: XLA\nmixed_precision: bf16\n"


@pytest.mark.parametrize(
    ("text", "chips", "environ", "found"),
    [
        (TPU_BF16, 4, {}, {"XLA_USE_BF16"}),
        (TPU_BF16, 0, {"PJRT_DEVICE": "TPU"}, {"XLA_USE_BF16"}),
        (TPU_BF16 + "downcast_bf16: yes\n", 4, {}, {"XLA_DOWNCAST_BF16", "ACCELERATE_DOWNCAST_BF16"}),
        (TPU_BF16, 0, {}, set()),
        (TPU_BF16 + ONE_EACH, 4, {}, set()),
        ("distributed_type: XLA\nmixed_precision: fp16\n", 4, {}, set()),
        ("mixed_precision: bf16\n" + SPMD, 4, {}, set()),
    ],
)
def test_a_tpu_computes_in_bf16_as_accelerate_has_it(text, chips, environ, found):
    plan = plan_of(text, chips=chips, environ=environ)
    assert {name for name in plan.env if name.endswith("BF16") and not name.startswith("FSDPLAUNCH_")} == found
    assert all(plan.env[name] == "1" for name in found)


@pytest.mark.parametrize(
    ("keys", "overrides", "by_size"),
    [
        ("xla: true, min_num_params: 2000", (), True),
        ("xla: true, fsdp_min_num_params: 2000, transformer_layer_cls_to_wrap: A", (), True),
        ("xla: true, min_num_params: 2000, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", (), False),
        ("xla: true, min_num_params: 0", (), False),
        ("xla: true, min_num_params: 2000", AUTO_WRAP, True),
        ("xla: true, min_num_params: 2000, transformer_layer_cls_to_wrap: A", AUTO_WRAP, True),
        ("xla: true", AUTO_WRAP, False),
        ("min_num_params: 2000", AUTO_WRAP, False),
    ],
)
def test_a_size_alone_makes_units_as_a_trainer_has_it(keys, overrides, by_size):
    config = stack(read_text(f"fsdp_config: {{{keys}}}\n", "x.json"), overrides=overrides).config
    expected = "SIZE_BASED_WRAP" if by_size else "TRANSFORMER_BASED_WRAP"
    assert config.fsdp_config.fsdp_auto_wrap_policy == expected


GUIDE = (Path(__file__).parents[2] / "cases" / "transformers_guide.yaml").read_text()
PRINTED = "xla: True # must be set\nxla_fsdp_settings: # XLA specific\nxla_fsdp_grad_ckpt: True # checkpointing\n"


def test_the_guides_keys_mean_the_same_at_the_top_and_in_their_section():
    section = GUIDE.replace("fsdp_config:\n", "fsdp_config:\n" + "".join(f"  {x}\n" for x in PRINTED.splitlines()))
    assert config_of(GUIDE + PRINTED) == config_of(section)
    assert config_of(section).fsdp_config.xla
    assert config_of(section).fsdp_config.xla_fsdp_grad_ckpt


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{compute_dtype: float8}", "compute_dtype must be float32, bfloat16 or float16, got float8"),
        (
            "{param_init_fn: f}",
            "param_init_fn is not an argument of XlaFullyShardedDataParallel that a file can hold",
        ),
        ("{flatten_parameters: maybe}", "flatten_parameters must be true or false, got maybe"),
        ("{_shard_size_multiple: 0}", "_shard_size_multiple must be a whole number, at least 1, got 0"),
        ("{sharding_groups: [[0, -1]]}", "sharding_groups must be a list of lists of ranks, got [[0, -1]]"),
        (
            "{mark_step_on_finalization: no, sync_on_finalization: yes}",
            "mark_step_on_finalization is the former name of sync_on_finalization, and both are set",
        ),
        ("{compute_dtypes: bf16, flatten_parameters: yes}", "that a file can hold (is compute_dtype meant?)"),
        ("yes", "must be a mapping of arguments of XlaFullyShardedDataParallel"),
    ],
)
def test_wrong_settings_are_named(settings, said):
    with pytest.raises(ConfigError) as caught:
        config_of(f"fsdp_config: {{xla: true, xla_fsdp_settings: {settings}}}\n")
    assert said in str(caught.value)
    assert str(caught.value).startswith("x.yaml:1:26: fsdp_config.xla_fsdp_settings: ")


def test_settings_are_those_of_the_class_by_its_names():
    text = (
        "fsdp_config: {xla: true, xla_fsdp_settings: {compute_dtype: torch.bfloat16, buffer_dtype: fp32,"
        " mark_step_on_finalization: yes, sharding_groups: [[0, 1], [2, 3]], _shard_size_multiple: 64}}\n"
    )
    assert config_of(text).fsdp_config.xla_fsdp_settings == {
        "compute_dtype": "bfloat16",
        "buffer_dtype": "float32",
        "sync_on_finalization": True,
        "sharding_groups": [[0, 1], [2, 3]],
        "_shard_size_multiple": 64,
    }


GROUPS = "fsdp_config: {xla: true, xla_fsdp_settings: {sharding_groups: [[0, 1]]}}\n"


def test_groups_that_would_train_models_of_their_own_are_refused():
    with pytest.raises(UsageError, match="each group would train its own model"):
        check_groups(config_of(GROUPS))
    check_groups(config_of(GROUPS.replace("xla: true", "xla: true, xla_v2: true")))


@pytest.mark.parametrize("given", ["x", "0", "-1", "²"])
def test_a_wrong_number_of_cpu_devices_is_named(given):
    with pytest.raises(UsageError, match=r"CPU_NUM_DEVICES is .*, which is not a number of devices"):
        plan_of(SPMD, environ={"CPU_NUM_DEVICES": given})


def notes_of(text, overrides=()):
    return [f"{note.key}: {note.message}" for note in stack(read_text(text, "x.yaml"), overrides=overrides).notes]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            "distributed_type: TPU\ndynamo_backend: INDUCTOR\n",
            "dynamo_config.dynamo_backend: is not used: PyTorch/XLA compiles by itself",
        ),
        ("xla: {cpu_devices: 4}\n", "xla.cpu_devices: is read under PyTorch/XLA only"),
    ],
)
def test_what_changes_nothing_is_named(text, note):
    assert note in notes_of(text)


@pytest.mark.parametrize(
    "text", ["distributed_type: XLA\nxla: {cpu_devices: 4}\n", ONE_EACH + "xla: {cpu_devices: 2}\n"]
)
def test_devices_that_nothing_drives_are_refused(text):
    with pytest.raises(
        ConfigError, match=r"xla\.cpu_devices: .: without xla_fsdp_v2 a process has one CPU device"
    ):
        config_of(text)


@pytest.mark.parametrize(
    ("torch", "torch_xla", "said"),
    [
        ("2.13.0+cpu", None, "PyTorch/XLA needs torch_xla, which is not installed; torch 2.13.0+cpu is installed"),
        ("2.13.0", "2.9.0", "torch_xla 2.9.0 needs torch 2.9, and torch 2.13.0 is installed"),
        (None, "2.9.0", "torch_xla 2.9.0 needs torch 2.9, and torch is not installed"),
        ("2.9.1+cu128", "2.9.0", None),
    ],
)
def test_versions_that_do_not_go_together_are_named(torch, torch_xla, said):
    found = problem(torch, torch_xla)
    assert (found and found.message) == said
    assert found is None or "[xla]" in found.hint


def test_a_launch_without_torch_xla_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", _absent)
    assert installed_problem() is not None
    (finding,) = [one for one in preflight.check_torch(with_xla=True) if "XLA" in one.message]
    assert finding.fatal
    assert finding.message.startswith("PyTorch/XLA needs torch_xla, which is not installed; torch ")


def _absent(name):
    if name == "torch":
        return "2.9.0"
    raise importlib.metadata.PackageNotFoundError(name)
