"""Files of the installed accelerate load here and mean what they say."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdplaunch.config.environment import decode, encode
from fsdplaunch.config.load import load_config

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
    assert load(written / "fsdp2_two_machines.yaml").config.rdzv_backend == "static"
    config = load(written / "default.yaml").config  # JSON in a file of that name
    assert (config.distributed_type, config.mixed_precision, config.use_cpu) == ("NO", "bf16", True)


def test_the_strategy_of_its_version_1_wizard_is_honoured(written):
    loaded = load(written / "fsdp1.yaml")
    assert loaded.config.fsdp_config.fsdp_sharding_strategy == "SHARD_GRAD_OP"
    assert encode(loaded.config)["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"
    hybrid = load(written / "fsdp1_hybrid.yaml").config
    assert hybrid.fsdp_config.fsdp_sharding_strategy == "HYBRID_SHARD"
    assert hybrid.fsdp_config.fsdp_transformer_layer_cls_to_wrap == ("LlamaDecoderLayer", "LlamaRMSNorm")
    assert (hybrid.num_machines, hybrid.machine_rank, hybrid.main_process_port) == (2, 1, 29501)


def test_pressing_enter_for_the_block_names_means_the_models_own(written):
    assert "fsdp_transformer_layer_cls_to_wrap: ''" in (written / "fsdp2.yaml").read_text()
    config = load(written / "fsdp2.yaml").config
    assert config.fsdp_config.fsdp_transformer_layer_cls_to_wrap == ()
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in encode(config)
