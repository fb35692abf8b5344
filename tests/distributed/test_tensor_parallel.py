"""Layers that ranks split compute what one process does: losses, norms, parameters."""

import copy
import io
import json
import os
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import fsdplaunch
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.split.styles import Cut
from tests.distributed import split_models as models
from tests.distributed.pool import RankPool
from tests.distributed.tiny import words_of
from tests.needs import needs


def variables(tensor: int, plan: dict[str, str] | None = None, **more: str) -> dict[str, str]:
    """What a launch with tp_size sets."""
    env = {"FSDP_VERSION": "2", "PARALLELISM_CONFIG_TP_SIZE": str(tensor), **more}
    return env | ({"FSDPLAUNCH_SHARDING_TENSOR_PARALLEL_PLAN": json.dumps(plan)} if plan else {})


def against_one(name: str) -> dict[str, Any]:
    alone, model = models.built(name), models.built(name)
    losses = models.train(alone, models.adamw(alone))
    model, optimizer = fsdplaunch.prepare(model, models.adamw(model))
    split = models.train(model, optimizer)
    described = fsdplaunch.describe(model)
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, split, strict=True)),
        "learnt": losses[0] - losses[-1],
        "values": models.difference(models.full_values(alone), models.full_values(model)),
        "split": len(described.split),
        "alike": len(described.alike),
        "sequences": (described.context, described.attention),
    }


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(("plain", 4), ("llama", 4), ("mixtral", 2), ("gpt2", 2)),
        pytest.param("deepseek", 2, marks=needs("transformers", "5.0", "has another plan for DeepSeek")),
    ],
)
def test_a_run_with_split_layers_is_that_of_one_process(four_ranks: RankPool, name: str, tensor: int) -> None:
    result = four_ranks.run(against_one, name, env=variables(tensor, models.MODELS[name][1]), timeout=200)[0]
    assert result["learnt"] > 0.01
    assert result["losses"] < 1e-5
    assert result["values"] < 1e-5
    assert result["split"]


class Narrow(nn.Module):
    """Layers of which some ranks have no shard: two rows over two ranks that split and two that shard."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(10, 2), nn.Linear(2, 10), nn.Parameter(torch.full((1,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.up(x))) * self.gain
        return result


NARROW_PLAN = {"up": "colwise", "down": "rowwise"}
ORDERS = (1.0, 2.0, 3.0, inf)


def norms() -> list[tuple[float, float, float]]:
    """Of each order: the norm in one process, that of the ranks, and how far the clipped gradients are apart."""
    found = []
    rows = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    for order in ORDERS:
        torch.manual_seed(0)
        alone = Narrow()
        model = copy.deepcopy(alone)
        model = fsdplaunch.prepare(
            model, plugin=fsdplaunch.FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap")
        )
        alone(rows).pow(2).mean().backward()
        model(rows.chunk(2)[dist.get_rank() // 2]).pow(2).mean().backward()
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.05, order)
        norm = fsdplaunch.clip_grad_norm_(model, 0.05, order)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        apart = max(float((one.grad.full_tensor() - other.grad).abs().max()) for one, other in pairs)
        found.append((wanted.item(), norm.item(), apart))
    return found


def overflow() -> tuple[float, float]:
    """The scale, and how far parameters move in a step in which one rank's part has an infinite gradient."""
    torch.manual_seed(0)
    model = fsdplaunch.prepare(models.Plain())
    optimizer, scaler = models.adamw(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = {name: value.clone() for name, value in models.full_values(model).items()}
    ids = models.batch(0)
    scaler.scale(model(ids, ids)[0]).backward()
    if dist.get_rank() == 1:
        model.layers[0].up.weight.grad.to_local().view(-1)[0] = inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), models.difference(before, models.full_values(model))


def test_norms_of_any_order_and_overflows_are_those_of_all_parts(four_ranks: RankPool) -> None:
    for found in four_ranks.run(norms, env=variables(2, NARROW_PLAN, FSDP_AUTO_WRAP_POLICY="NO_WRAP")):
        for wanted, norm, apart in found:
            assert norm == pytest.approx(wanted, rel=1e-5)
            assert wanted > 0.05, "nothing was clipped"
            assert apart < 1e-6
    for scale, moved in four_ranks.run(overflow, env=variables(2, models.PLAIN_PLAN)):
        assert scale == 2.0
        assert moved == 0


def graphs() -> tuple[int, list[tuple[int, ...]]]:
    """How many graphs a forward of three compiled blocks makes, and what one compiled function makes of cuts."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = models.Plain()
    model.layers.append(models.Block())
    model = fsdplaunch.prepare(model)
    ids = models.batch(0)
    model(input_ids=ids, labels=ids)
    made = int(counters["stats"]["unique_graphs"])
    own_part = torch.compile(lambda cut, param: cut.local(param), backend="eager")
    axis, full = init_device_mesh("cpu", (2,)), torch.ones(4, 6)
    return made, [tuple(own_part(cut, cut.split(full, axis)).shape) for cut in (Cut(dim=0), Cut(dim=1), Cut())]


def test_blocks_with_split_layers_are_compiled_once_for_all(two_ranks: RankPool) -> None:
    compiled = {"ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}
    for made, shapes in two_ranks.run(graphs, env=variables(2, models.PLAIN_PLAN, **compiled)):
        assert made == 1
        assert shapes == [(2, 6), (4, 3), (4, 6)]


def refused(name: str, change: str = "") -> str:
    """The sentence a model is refused with."""
    model = models.built(name)
    if not change:
        return words_of(fsdplaunch.prepare, model)
    model, _ = fsdplaunch.prepare(model, models.adamw(model))
    ids = models.batch(dist.get_rank() if change == "other data" else 0)
    return words_of(model, input_ids=ids, labels=ids)


def step_with(plan_without: str) -> str:
    """Train one step of Qwen3 by its own plan without some of its patterns, written in the file."""
    model = models.built("qwen3")
    plan = {name: style for name, style in model.tp_plan.items() if plan_without not in name}
    os.environ["FSDPLAUNCH_SHARDING_TENSOR_PARALLEL_PLAN"] = json.dumps(plan)
    model, optimizer = fsdplaunch.prepare(model, models.adamw(model))
    return words_of(models.train, model, optimizer, steps=1)


@needs("transformers", "5.0", "has another plan for Qwen3")
def test_a_norm_inside_of_split_heads_that_the_plan_forgets_is_found_at_the_first_step(
    four_ranks: RankPool,
) -> None:
    said = four_ranks.run(step_with, "_norm", env=variables(2))
    assert "different gradients of model.layers.0.self_attn.q_norm.weight" in said[0]
    assert four_ranks.run(step_with, "nothing of it", env=variables(2)) == ["nothing was raised"] * 4


REFUSED = {
    "no pattern": ("plain", {"layers.*.attn.query": "colwise"}, "layers.*.attn.query matches no module"),
    "no style": ("plain", {"layers.*.up": "columnwise"}, "columnwise is not a style to split a layer"),
    "no matrix": ("plain", {"layers.*.before": "colwise"}, "is a LayerNorm, and colwise splits a linear layer"),
    "no plan": ("gpt2", {}, "GPT2LMHeadModel has no plan of how its layers can be split"),
    "nothing": (
        "plain",
        {"layers.*.before": "local"},
        "sharding.tensor_parallel_plan splits no parameter of Plain",
    ),
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
    wrong = {"layers.*.down": "rowwise"}
    said = four_ranks.run(refused, "plain", "pass", env=variables(2, wrong))
    assert all("Plain cannot compute with split layers (tp_size): " in text for text in said), said
    assert "sharding.tensor_parallel_plan does not fit what its layers compute" in said[0]
    wrong |= {"layers.*.up": "packed_colwise", "layers.*.gain": "colwise"}
    said = four_ranks.run(refused, "plain", "pass", env=variables(2, wrong))
    assert all("Plain computes different values with split layers (tp_size)" in text for text in said), said
    said = four_ranks.run(refused, "plain", "other data", env=variables(2, models.PLAIN_PLAN))
    assert "ranks 0, 1 split layers together (tp_size), and their inputs differ" in said[0]
    assert "ranks 2, 3" in said[3]


@needs("transformers", "5.0", "computes experts one by one")
def test_experts_cut_smaller_than_their_kernel_takes_are_an_error_that_says_so(four_ranks: RankPool) -> None:
    bf16 = variables(4, ACCELERATE_MIXED_PRECISION="bf16")
    said = four_ranks.run(refused, "mixtral", "pass", env=bf16)
    assert "strides should be multiple of 16 bytes" in said[0]
    assert "use smaller groups (tp_size)" in said[0]


def save(folder: str, name: str) -> None:
    """Train two steps, save a checkpoint and beside it the gathered values."""
    model = models.built(name)
    model, optimizer = fsdplaunch.prepare(model, models.adamw(model))
    models.train(model, optimizer, steps=2)
    fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer, step=2)
    values, copied = models.full_values(model), copy.deepcopy(model)
    losses = models.train(model, optimizer, first=2, steps=2)
    assert fsdplaunch.describe(copied) == fsdplaunch.describe(model)
    with pytest.raises(
        CheckpointError, match=r"test_tensor_parallel.py:\d+ pickles a model that prepare has sharded"
    ):
        torch.save(copied, io.BytesIO())
    assert models.difference(values, models.full_values(copied)) == 0, "the copy is not one of its own"
    assert models.train(copied, models.adamw(copied), first=2, steps=1)[0] == pytest.approx(losses[0], abs=1e-5)
    if dist.get_rank() == 0:
        torch.save({"values": values, "losses": losses}, f"{folder}.gathered")


def load(folder: str, name: str) -> tuple[bool, float]:
    """Whether the values are those that were saved, and how far the next losses are from the saved ones."""
    torch.manual_seed(99)
    model = models.MODELS[name][0]()
    model, optimizer = fsdplaunch.prepare(model, models.adamw(model))
    fsdplaunch.load_checkpoint(folder, model=model, optimizer=optimizer)
    gathered, mine = torch.load(f"{folder}.gathered"), models.full_values(model)
    same = all(torch.equal(values, mine[key]) for key, values in gathered["values"].items())
    losses = models.train(model, optimizer, first=2, steps=2)
    return same, max(abs(a - b) for a, b in zip(losses, gathered["losses"], strict=True))


def read_weights(path: str, folder: str, name: str) -> bool:
    """Whether a model without memory that reads its shards from a merged file has the gathered values."""
    with torch.device("meta"):
        model = models.MODELS[name][0]()
    model = fsdplaunch.prepare(model, weights=path)
    assert fsdplaunch.describe(model).split, "the layers are not split"
    mine, gathered = models.full_values(model), torch.load(f"{folder}.gathered")["values"]
    return all(torch.equal(values, mine[key]) for key, values in gathered.items())


@pytest.mark.parametrize(
    ("name", "kind", "others"),
    [
        pytest.param(
            *("qwen3", "SHARDED_STATE_DICT", ((4, 1), (2, 2))),
            marks=needs("transformers", "5.0", "does not make Qwen3's frequencies again"),
        ),
        ("mixtral", "FULL_STATE_DICT", ((4, 2), (4, 4))),
    ],
)
def test_a_checkpoint_of_one_mesh_loads_on_each_other_and_merges(
    four_ranks: RankPool, two_ranks: RankPool, tmp_path: Path, name: str, kind: str, others: Any
) -> None:
    folder, plan = tmp_path / "step", models.MODELS[name][1]
    four_ranks.run(save, str(folder), name, env=variables(2, plan, FSDP_STATE_DICT_TYPE=kind), timeout=200)
    for size, tensor in others:
        pool = {2: two_ranks, 4: four_ranks}[size]
        for same, distance in pool.run(load, str(folder), name, env=variables(tensor, plan), timeout=200):
            assert same, (size, tensor)
            assert distance < 1e-5
    if kind == "SHARDED_STATE_DICT":
        fsdplaunch.merge_fsdp_weights(
            str(folder / "checkpoint-2" / "pytorch_model_fsdp_0"), str(tmp_path / "merged")
        )
        merged = load_file(tmp_path / "merged" / "model.safetensors")
        gathered = torch.load(f"{folder}.gathered")["values"]
        assert all(torch.equal(merged[key], values) for key, values in gathered.items() if key in merged)
        assert gathered.keys() - merged.keys() <= {"lm_head.weight", "model.embed_tokens.weight"}
        env = variables(2, plan)
        assert all(four_ranks.run(read_weights, str(tmp_path / "merged"), str(folder), name, env=env, timeout=200))


def read_data(folder: str, first: int, batches: int) -> list[list[int]]:
    """Batches of a prepared loader, read from where the checkpoint has it unless it is the first run."""
    torch.manual_seed(5)
    model, loader = fsdplaunch.prepare(models.Plain(), DataLoader(torch.arange(32), batch_size=2, shuffle=True))
    if first:
        fsdplaunch.load_checkpoint(folder, model=model, loader=loader)
    read = [batch.tolist() for batch, _ in zip(loader, range(batches), strict=False)]
    if not first:
        fsdplaunch.save_checkpoint(folder, model=model, loader=loader, step=1)
    return read


def test_ranks_that_split_layers_read_the_same_data_and_a_resumed_run_goes_on_there(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    env = variables(2, models.PLAIN_PLAN)
    first = four_ranks.run(read_data, str(tmp_path / "run"), 0, 4, env=env)
    assert first[0] == first[1]
    assert first[2] == first[3]
    items = [item for rank in (0, 2) for batch in first[rank] for item in batch]
    assert len(set(items)) == 16
    then = four_ranks.run(read_data, str(tmp_path / "run"), 1, 2, env=variables(1))
    assert set(items).isdisjoint(item for rank in then for batch in rank for item in batch)
    assert {item for rank in then for batch in rank for item in batch} | set(items) == set(range(32))


def odd_vocabulary() -> dict[str, Any]:
    """A vocabulary that two ranks cannot divide, under the model's own plan: losses against one process."""
    models.WORDS = models.SIZES["vocab_size"] = 97
    try:
        return against_one("llama")
    finally:
        models.WORDS = models.SIZES["vocab_size"] = 96


def test_a_vocabulary_that_ranks_cannot_divide_stays_in_full(four_ranks: RankPool) -> None:
    result = four_ranks.run(odd_vocabulary, env=variables(2), timeout=200)[0]
    assert result["values"] < 1e-5
    assert (result["split"], result["alike"]) == (14, 7)
