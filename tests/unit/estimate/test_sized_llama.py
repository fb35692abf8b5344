"""A size as a model: a llama that the estimate describes, of about that size."""

import pytest

from fsdplaunch.estimate.model import count_parameters, describe, llama_of


@pytest.mark.parametrize("parameters", [60_000_000, 1_000_000_000, 8_000_000_000, 70_000_000_000])
def test_the_llama_has_about_the_named_size(parameters):
    config = llama_of(parameters)
    counted = describe(config, source="x").sizes.parameters
    assert counted == count_parameters(config["hidden_size"], config["num_hidden_layers"])
    assert abs(counted / parameters - 1) < 0.1
