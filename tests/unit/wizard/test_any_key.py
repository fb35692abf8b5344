"""The last question offers every key that no other question decides."""

from types import SimpleNamespace
from typing import Any

from fsdplaunch.config.schema.config import keys_by_path
from fsdplaunch.wizard.conversation import further_keys, read_setting


def test_axes_of_the_mesh_are_offered_and_their_plan_is_read() -> None:
    state: Any = SimpleNamespace(version=2)
    offered = {spec.name for spec in further_keys(state)}
    assert {"parallelism_config_tp_size", "parallelism_config_cp_size", "tensor_parallel_plan"} <= offered
    plan = keys_by_path()["sharding", "tensor_parallel_plan"]
    assert read_setting(plan, "{layers.*.up: colwise}") == {"layers.*.up": "colwise"}
