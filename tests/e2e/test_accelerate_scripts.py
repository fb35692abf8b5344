"""Scripts written for accelerate and for the transformers Trainer run as they are, and shard on a CPU too."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.needs import has

HERE = Path(__file__).parent

ACCELERATE = """\
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_version: {version}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: TransformerEncoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""

GUIDE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""The file that transformers' guide prints."""


@pytest.mark.parametrize("version", [1, 2])
def test_accelerator_script_shards_on_cpu_and_its_state_comes_back(fsdplaunch, tmp_path, version):
    """accelerate 1.12 cannot load the sharded optimizer that it saved."""
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE.format(version=version) + "launch:\n  preload: [accelerate]\n")
    brought_back = "state" if has("accelerate", "1.13") else "model"
    done = fsdplaunch("launch", HERE / "accelerate_script.py", tmp_path, brought_back)
    assert done.returncode == 0, done.stderr
    assert f"2 processes, FSDP{version}, cpu" in done.stdout
    assert len(load_file(tmp_path / "model" / "model.safetensors")) == 24

    merged = fsdplaunch("merge-weights", tmp_path / "state", tmp_path / "merged")
    assert merged.returncode == 0, merged.stderr
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    theirs = load_file(tmp_path / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_trainer_script_with_the_guides_file_shards_on_cpu_and_saves_whole_weights(fsdplaunch, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(GUIDE)
    preload = ("--set", "launch.preload=transformers,accelerate")
    done = fsdplaunch("launch", *preload, HERE / "trainer_script.py", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "DistributedType.FSDP FullyShardedDataParallel" in done.stdout
    assert (tmp_path / "out" / "checkpoint-1" / "pytorch_model_fsdp_0" / ".metadata").is_file()
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert "bert.encoder.layer.1.output.dense.weight" in weights
    summary = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())["summary"]
    assert (summary["step"], summary["steps_total"]) == (2, 2)
