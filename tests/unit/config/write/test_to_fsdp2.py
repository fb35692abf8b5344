"""A file for FSDP1 becomes one for FSDP2; nothing is lost silently."""

import json
from pathlib import Path

import pytest

from fsdplaunch.config.convert import to_fsdp2
from fsdplaunch.config.resolve import mesh_sizes
from tests.yaml_config import loaded as load

GUIDE = (Path(__file__).parents[3] / "cases" / "transformers_guide.yaml").read_text()


def version_1(strategy, more=""):
    head = "num_processes: 8\nnum_machines: 2\nfsdp_config:\n  fsdp_version: 1\n"
    return f"{head}  fsdp_sharding_strategy: {strategy}\n{more}"


@pytest.mark.parametrize(
    ("strategy", "reshard", "mesh"),
    [
        ("FULL_SHARD", True, (1, 8)),
        ("SHARD_GRAD_OP", False, (1, 8)),
        ("NO_SHARD", True, (8, 1)),
        ("3", True, (8, 1)),
        ("HYBRID_SHARD", True, (2, 4)),
        ("hybrid shard zero2", False, (2, 4)),
    ],
)
@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
def test_a_strategy_becomes_reshard_and_mesh(strategy, reshard, mesh, key):
    text, _ = to_fsdp2(version_1(strategy).replace("fsdp_sharding_strategy", key))
    config = load(text).config
    assert config.fsdp_config.fsdp_version == 2
    assert config.fsdp_config.fsdp_reshard_after_forward is reshard
    assert config.fsdp_config.fsdp_state_dict_type == "FULL_STATE_DICT"  # version 1's default
    assert mesh_sizes(config, 8)[:2] == mesh
    assert "fsdp_sharding_strategy:" not in text


def test_every_key_of_version_1_is_named_with_its_consequence():
    text = version_1(
        "FULL_SHARD",
        "  fsdp_backward_prefetch_policy: NO_PREFETCH\n  use_orig_params: false\n"
        "  fsdp_state_dict_type: LOCAL_STATE_DICT\nprecision:\n  buffer: bf16\n",
    )
    converted, changes = to_fsdp2(text)
    told = {change.key: (change.action, change.message) for change in changes}
    assert told["fsdp_config.fsdp_backward_prefetch"][0] == "dropped"
    assert told["fsdp_config.fsdp_backward_prefetch"][1].startswith("NO_PREFETCH; FSDP2 gathers the next unit")
    assert told["fsdp_config.fsdp_use_orig_params"][1].startswith("false; FSDP2 always shows")
    assert told["fsdp_config.fsdp_state_dict_type"][0] == "changed"
    assert told["precision.buffer"][0] == "dropped"
    assert told["fsdp_config.fsdp_version"] == ("changed", "2")
    for gone in ("prefetch", "orig_params", "buffer", "LOCAL"):
        assert gone not in converted
    assert load(converted).notes == ()


def test_comments_and_order_stay():
    converted, _ = to_fsdp2(
        "# top\n" + GUIDE.replace("  fsdp_offload_params: true", "  fsdp_offload_params: true  # slow")
    )
    kept = [
        line
        for line in GUIDE.splitlines()
        if not any(word in line for word in ("prefetch", "strategy", "orig", "sync_module_states"))
    ]
    lines = [line.replace("  # slow", "") for line in converted.splitlines()]
    assert lines[0] == "# top"
    assert [line for line in lines if line in kept] == kept
    assert set(lines) - set(kept) == {"# top", "  fsdp_version: 2", "  fsdp_reshard_after_forward: true"}
    assert "fsdp_offload_params: true  # slow\n" in converted


def test_a_file_for_version_2_comes_back_as_it_is_and_so_do_mesh_sizes():
    said = version_1("HYBRID_SHARD", "parallelism_config:\n  parallelism_config_dp_replicate_size: 4\n")
    assert mesh_sizes(load(to_fsdp2(said)[0]).config, 8)[:2] == (4, 2)
    text = "# mine\nfsdp_config: {fsdp_version: 2}\n"
    assert to_fsdp2(text) == (text, [])
    dead = "fsdp_config:\n  fsdp_version: 2\n  fsdp_use_orig_params: false\n"
    assert "use_orig_params" not in to_fsdp2(dead)[0]


def test_a_converted_json_file_is_json():
    text = '{\n  "fsdp_config": {\n    "fsdp_version": 1,\n    "fsdp_sharding_strategy": 2\n  }\n}\n'
    assert json.loads(to_fsdp2(text)[0])["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
