"""Files of the installed accelerate load here and mean what they say; our files mean the same in accelerate."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdplaunch.config.convert import keys_ignored_by_accelerate, to_accelerate
from fsdplaunch.config.environment import decode, encode
from fsdplaunch.config.load import load_config, stack
from fsdplaunch.config.resolve import with_mesh, world_size
from fsdplaunch.config.yaml_text import read_text
from tests.cli.test_accelerate_environment import theirs, unlisted

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
PEER = Path(__file__).with_name("accelerate_peer.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with what accelerate's wizard and `config default` write."""
    folder = tmp_path_factory.mktemp("accelerate")
    done = subprocess.run([sys.executable, str(PEER), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def load(path):
    return load_config(path, environ={})


def test_every_file_accelerate_writes_loads(written):
    names = sorted(path.name for path in written.iterdir())
    assert names == [
        "ddp.yaml",
        "default.yaml",
        "fsdp1.yaml",
        "fsdp1_hybrid.yaml",
        "fsdp2.yaml",
        "fsdp2_mesh.yaml",
        "fsdp2_two_machines.yaml",
    ]
    for name in names:
        loaded = load(written / name)
        assert sum("has no effect here" in note.message for note in loaded.notes) == 1
        assert decode(encode(loaded.config)) == loaded.config


def test_the_strategy_of_its_version_1_wizard_is_honoured(written):
    loaded = load(written / "fsdp1.yaml")
    assert loaded.config.fsdp_config.fsdp_sharding_strategy == "SHARD_GRAD_OP"
    assert encode(loaded.config)["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"
    assert "fsdp_config.fsdp_reshard_after_forward" in keys_ignored_by_accelerate(loaded)
    hybrid = load(written / "fsdp1_hybrid.yaml").config
    assert hybrid.fsdp_config.fsdp_sharding_strategy == "HYBRID_SHARD"
    assert hybrid.fsdp_config.fsdp_transformer_layer_cls_to_wrap == ("LlamaDecoderLayer", "LlamaRMSNorm")
    assert (hybrid.num_machines, hybrid.machine_rank, hybrid.main_process_port) == (2, 1, 29501)


def test_pressing_enter_for_the_block_names_means_the_models_own(written):
    assert "fsdp_transformer_layer_cls_to_wrap: ''" in (written / "fsdp2.yaml").read_text()
    config = load(written / "fsdp2.yaml").config
    assert config.fsdp_config.fsdp_transformer_layer_cls_to_wrap == ()
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in encode(config)


def test_the_rendezvous_of_its_file_is_honoured(written):
    assert load(written / "fsdp2_two_machines.yaml").config.rdzv_backend == "static"


def test_json_in_a_yaml_file_loads(written):
    config = load(written / "default.yaml").config
    assert (config.distributed_type, config.mixed_precision, config.use_cpu) == ("NO", "bf16", True)


OURS = {
    "FSDP1": "fsdp_config: {fsdp_version: 1, sharding_strategy: SHARD_GRAD_OP, offload_params: true}\n",
    "FSDP1 by reshard": "fsdp_config: {fsdp_version: 1, fsdp_reshard_after_forward: NO_SHARD}\n",
    "FSDP1, prefetch": (
        "fsdp_config: {fsdp_version: 1, backward_prefetch: 2, forward_prefetch: true, use_orig_params: false,"
        " sync_module_states: false, state_dict_type: 2}\n"
    ),
    "FSDP2": "fsdp_config: {fsdp_version: 2}\n",
    "FSDP2, gathered": "fsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: SHARD_GRAD_OP}\n",
    "FSDP2, size": "fsdp_config: {auto_wrap_policy: SIZE_BASED_WRAP, min_num_params: 1e6}\n",
    "FSDP2, names": (
        "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: [Block, Other]\n"
        "  fsdp_activation_checkpointing: true\n  fsdp_activation_checkpointing_offload: true\n"
        "  fsdp_ignored_modules: 'lm_.*'\n  fsdp_cpu_ram_efficient_loading: true\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n"
    ),
    "FSDP2, no wrap": "fsdp_config: {auto_wrap_policy: NO_WRAP}\n",
    "FSDP2, mesh": "parallelism_config: {dp_replicate_size: 2, dp_shard_size: 2}\n",
    "FSDP2, hybrid": "num_machines: 2\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: HYBRID_SHARD}\n",
}


@pytest.mark.parametrize("name", OURS)
def test_converted_file_gives_accelerate_the_environment_it_gives_us(name, tmp_path, monkeypatch):
    for variable in [one for one in os.environ if one.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_"))]:
        monkeypatch.delenv(variable)
    loaded = stack(read_text(f"mixed_precision: bf16\nnum_processes: 4\n{OURS[name]}", "x"))
    path = tmp_path / "converted.yaml"
    path.write_text(to_accelerate(loaded).text)
    made = encode(with_mesh(loaded.config, world_size(loaded.config)))
    here = {variable: text for variable, text in made.items() if not variable.startswith("FSDPLAUNCH_")}
    there = theirs(path)
    assert unlisted(here, there) == []
    assert (there["ACCELERATE_USE_FSDP"], there["ACCELERATE_MIXED_PRECISION"]) == ("true", "bf16")
