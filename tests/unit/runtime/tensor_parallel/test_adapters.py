"""Which layers inside of an adapter a plan's style for the layer splits."""

import pytest
from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.tensor_parallel.plan import adapted_layers
from fsdplaunch.runtime.tensor_parallel.styles import STYLES


class Adapter(nn.Module):
    """A layer between two small matrices, as PEFT holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8)})


class Replaced(nn.Module):
    """A layer with a trained copy."""

    def __init__(self) -> None:
        super().__init__()
        self.original_module = nn.Linear(8, 8)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(8, 8)})


SUMMED = "replicated_with_grad_allreduce"
LAYERS = {
    "colwise": {"base_layer": "colwise", "lora_B.default": "colwise"},
    "packed_colwise": {"base_layer": "packed_colwise", "lora_B.default": "packed_colwise"},
    "rowwise": {"base_layer": "rowwise", "lora_A.default": "rowwise"},
    "colwise_gather_output": {"base_layer": "colwise_gather_output"},
    "rowwise_split_input": {"base_layer": "rowwise_split_input"},
    "local_colwise": {"base_layer": "local_colwise", "lora_B.default": "local_colwise", "lora_A.default": SUMMED},
    "local_rowwise": {"base_layer": "local_rowwise", "lora_A.default": "local_rowwise", "lora_B.default": SUMMED},
}


@pytest.mark.parametrize("style", LAYERS)
def test_the_matrix_that_meets_split_activations_is_split(style: str) -> None:
    module = Adapter()
    names = {layer: name for name, layer in module.named_modules()}
    found = adapted_layers(module, STYLES[style], "q_proj", style)
    assert found is not None
    assert {names[layer]: name for layer, name in found.items()} == LAYERS[style]


def test_a_trained_copy_is_split_as_what_it_replaces() -> None:
    module = Replaced()
    found = adapted_layers(module, STYLES["colwise"], "lm_head", "colwise")
    assert found == {module.original_module: "colwise", module.modules_to_save["default"]: "colwise"}


def test_a_plain_layer_has_no_adapters() -> None:
    assert adapted_layers(nn.Linear(2, 2), STYLES["colwise"], "up", "colwise") is None
    assert adapted_layers(Adapter(), STYLES["all_reduce"], "up", "all_reduce") is None


def test_adapters_of_another_kind_are_refused() -> None:
    module = Adapter()
    module.ia3_l = nn.ParameterDict({"default": nn.Parameter(module.base_layer.weight[0].detach())})
    with pytest.raises(ShardingError, match="cannot split the adapters of q_proj: Adapter has ia3_l"):
        adapted_layers(module, STYLES["colwise"], "q_proj", "colwise")
