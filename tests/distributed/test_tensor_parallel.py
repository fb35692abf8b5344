"""Layers that ranks split compute what one process does: losses, norms, parameters."""

import json
from typing import Any

import pytest
import torch.distributed as dist

import fsdplaunch
from fsdplaunch.errors import ShardingError
from tests.distributed import split_models as models
from tests.distributed.pool import RankPool


def variables(tensor: int, plan: dict[str, str] | None = None, **more: str) -> dict[str, str]:
    """What a launch with tp_size sets."""
    env = {"FSDP_VERSION": "2", "PARALLELISM_CONFIG_TP_SIZE": str(tensor), **more}
    return env | ({"FSDPLAUNCH_SHARDING_TENSOR_PARALLEL_PLAN": json.dumps(plan)} if plan else {})


def against_one(name: str) -> dict[str, Any]:
    alone, model = models.built(name), models.built(name)
    losses = models.train(alone, models.adamw(alone))
    model, optimizer = fsdplaunch.prepare(model, models.adamw(model))
    split = models.train(model, optimizer)
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, split, strict=True)),
        "learnt": losses[0] - losses[-1],
        "values": models.difference(models.full_values(alone), models.full_values(model)),
        "lines": list(fsdplaunch.describe(model).lines()),
    }


@pytest.mark.parametrize("tensor", [2, 4, 1])
@pytest.mark.parametrize("name", models.MODELS)
def test_a_run_with_split_layers_is_that_of_one_process(four_ranks: RankPool, name: str, tensor: int) -> None:
    result = four_ranks.run(against_one, name, env=variables(tensor, models.MODELS[name][1]), timeout=200)[0]
    assert result["learnt"] > 0.01
    assert result["losses"] < 1e-5
    assert result["values"] < 1e-5


def refused(name: str, change: str = "") -> str:
    """The sentence a model is refused with."""
    model = models.built(name)
    if change == "other data":
        model, _ = fsdplaunch.prepare(model, models.adamw(model))
    try:
        if change == "other data":
            ids = models.batch(dist.get_rank())
            model(input_ids=ids, labels=ids)
        else:
            fsdplaunch.prepare(model)
    except ShardingError as error:
        return f"{error.message} ({error.hint})"
    return "accepted"


REFUSED = {
    "no pattern": ("plain", {"layers.*.attn.query": "colwise"}, "layers.*.attn.query matches no module"),
    "no style": ("plain", {"layers.*.up": "columnwise"}, "columnwise is no style to split a layer"),
    "no matrix": ("plain", {"layers.*.before": "colwise"}, "is a LayerNorm, and colwise splits a linear layer"),
    "no plan": ("gpt2", {}, "GPT2LMHeadModel has no plan of how its layers can be split"),
    "twice": (
        "plain",
        {"layers.*.up": "colwise", "layers.0.*": "rowwise"},
        "layers.0.up is colwise by layers.*.up and rowwise by layers.0.*",
    ),
}


def test_a_plan_that_does_not_fit_is_refused_before_training(four_ranks: RankPool) -> None:
    for name, plan, message in REFUSED.values():
        said = four_ranks.run(refused, name, env=variables(2, plan))
        assert all(message in text for text in said), said[0]
    heads = four_ranks.run(refused, "llama", env=variables(4) | {"SPLIT_MODELS_KV_HEADS": "2"})
    assert "LlamaForCausalLM has 2 key-value heads, which 4 ranks (tp_size) cannot divide" in heads[0]
    said = four_ranks.run(refused, "plain", "other data", env=variables(2, models.PLAIN_PLAN))
    assert "ranks 0, 1 split layers together (tp_size), and their inputs differ" in said[0]
    assert "ranks 2, 3" in said[3]
