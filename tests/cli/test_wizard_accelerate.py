"""Files of the wizard that have no section of our own mean the same to accelerate."""

from pathlib import Path

import pytest

from fsdplaunch.config.environment import encode
from fsdplaunch.config.load import load_config
from fsdplaunch.config.resolve import resolve
from fsdplaunch.wizard.run import run_wizard
from tests.cli.test_accelerate_environment import NEWER, meaning
from tests.unit.wizard.conftest import MACHINES

EIGHT = MACHINES["eight_h100"]
TWO_MACHINES = {"where": "machines", "nodes": "2", "rendezvous": "n1:29400"}


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"goal": "fastest", "wrap": "LlamaDecoderLayer,Other"},
        {"goal": "biggest", "wrap": "size:1m", "precision": "no"},
        {"wrap": "none", "workers-per-node": "2", "precision": "fp16"},
        TWO_MACHINES,
        {**TWO_MACHINES, "goal": "hybrid"},
    ],
    ids=["suggested", "fastest", "biggest", "unwrapped", "two machines", "hybrid"],
)
@pytest.mark.parametrize("version", [1, 2])
def test_wizard_file_gives_accelerate_the_environment_it_gives_us(answers, version):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    overrides = [f"fsdp_version={version}"]
    result = run_wizard(
        facts=EIGHT, say=pytest.fail, answers=answers, overrides=overrides, interactive=False, yes=True
    )
    Path("fsdp.yaml").write_text(result.text)
    arguments = launch_command_parser().parse_args(["--config_file", "fsdp.yaml", "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    theirs = prepare_multi_gpu_env(arguments)
    ours = encode(resolve(result.config))
    prefixes = ("FSDP_", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION")
    if version == 2 and answers.get("goal") == "hybrid":
        sizes = {name: theirs[f"PARALLELISM_CONFIG_{name}_SIZE"] for name in ("DP_REPLICATE", "DP_SHARD")}
        assert sizes == {"DP_REPLICATE": "2", "DP_SHARD": "8"}
    told = {name: text for name, text in ours.items() if name.startswith(prefixes)}
    told = {name: text for name, text in told.items() if name in theirs or name not in NEWER}
    assert {name: meaning(name, theirs.get(name, "")) for name in told} == {
        name: meaning(name, text) for name, text in told.items()
    }
    written = load_config(Path("fsdp.yaml"), environ={})
    assert written.notes == ()  # so that config validate --strict passes it
    for key in ("fsdp_sharding_strategy", "fsdp_auto_wrap_policy", "fsdp_state_dict_type"):
        assert written.origins["fsdp_config", key].layer == "file"
    assert arguments.num_processes == result.config.num_processes
    assert arguments.num_machines == result.config.num_machines
    assert arguments.main_process_ip == result.config.main_process_ip
