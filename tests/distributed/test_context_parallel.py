"""Sequences that ranks split compute what one process does, in less memory; what cannot be split is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdplaunch
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.context_parallel.attention import attend
from fsdplaunch.runtime.context_parallel.exchanges import own_piece
from tests.distributed import split_models as models
from tests.distributed.pool import RankPool
from tests.distributed.test_tensor_parallel import against_one, variables


def sequences(context: int, tensor: int = 1, name: str = "", **more: str) -> dict[str, str]:
    """What a launch with cp_size sets."""
    plan = models.MODELS[name][1] if tensor > 1 else None
    return variables(tensor, plan, PARALLELISM_CONFIG_CP_SIZE=str(context), **more)


@pytest.mark.parametrize(
    ("name", "context", "tensor"),
    [("plain", 2, 1), ("plain", 2, 2), ("llama", 4, 1), ("gpt2", 2, 1)],
)
def test_a_run_with_split_sequences_is_that_of_one_process(
    four_ranks: RankPool, name: str, context: int, tensor: int
) -> None:
    result = four_ranks.run(against_one, name, env=sequences(context, tensor, name), timeout=200)[0]
    assert result["learnt"] > 0.01
    assert result["losses"] < 1e-5
    assert result["values"] < 1e-5
    assert f"  sequences split: over {context} ranks inside of the blocks" in result["lines"]


def apart(axis: DeviceMesh, heads: int, kv_heads: int, *, mask: bool, is_causal: bool) -> float:
    """How far attention of split sequences is from that of full ones: values and gradients."""
    torch.manual_seed(0)
    full = [torch.randn(2, each, 8, 4, requires_grad=True) for each in (heads, kv_heads, kv_heads)]
    how: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": heads != kv_heads}
    seen, weights = torch.randn(2, 1, 8, 8) if mask else None, torch.randn(2, heads, 8, 4)
    mixed = nn.functional.scaled_dot_product_attention(*full, seen, **how)
    (mixed * weights).sum().backward()
    mine = [own_piece(each.detach(), axis, 2).requires_grad_() for each in full]
    got = attend(axis, *mine, seen, **how)
    (got * own_piece(weights, axis, 2)).sum().backward()
    pairs = zip([got, *(each.grad for each in mine)], [mixed, *(each.grad for each in full)], strict=True)
    return max(float((one - own_piece(other, axis, 2)).abs().max()) for one, other in pairs if other is not None)


def attentions() -> dict[str, float]:
    axis = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        f"{heads}, {kv_heads}, {mask}, {is_causal}": apart(axis, heads, kv_heads, mask=mask, is_causal=is_causal)
        for heads, kv_heads in ((4, 4), (4, 1), (3, 3), (6, 2))
        for mask, is_causal in ((False, True), (True, False), (False, False))
    }


def test_attention_is_exact_also_where_ranks_do_not_divide_the_heads(four_ranks: RankPool) -> None:
    for found in four_ranks.run(attentions):
        assert len(found) == 12
        assert max(found.values()) < 1e-5, found


class Counting(models.Block):
    """A block that counts positions itself, from 0 on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.arange(x.size(1)).unsqueeze(-1) * torch.linspace(0, 0.1, 32))


class Shifting(models.Block):
    """A block that mixes neighbours without attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.roll(1, 1))


def refused(kind: str, length: int) -> str:
    torch.manual_seed(0)
    model = models.Plain()
    if kind != "Block":
        model.layers = nn.ModuleList(globals()[kind]() for _ in range(2))
    model = fsdplaunch.prepare(model)
    ids = models.batch(0)[:, :length]
    try:
        model(input_ids=ids, labels=ids)
    except ShardingError as error:
        return f"{error.message} ({error.hint})"
    return "accepted"


def test_what_cannot_be_split_is_refused_at_the_first_step(four_ranks: RankPool) -> None:
    env = sequences(2)
    for kind in ("Counting", "Shifting"):
        said = four_ranks.run(refused, kind, 12, env=env)
        assert all("computes something else with split sequences (cp_size)" in text for text in said), said
    said = four_ranks.run(refused, "Block", 11, env=env)
    assert "sequences of 11 cannot be divided by 2 ranks (cp_size)" in said[0]


def saved_bytes(length: int) -> int:
    """Bytes that a forward keeps for backward inside of the blocks."""
    torch.manual_seed(0)
    model = fsdplaunch.prepare(models.Plain())
    ids = torch.randint(0, models.WORDS, (1, length))
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    model(input_ids=ids, labels=ids)  # the first pass compares
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids)[0]
    loss.backward()
    return sum(storage.nbytes() for storage in kept.values())


def test_activations_take_less_memory_the_more_ranks_split_a_sequence(four_ranks: RankPool) -> None:
    one, two, four = (four_ranks.run(saved_bytes, 512, env=sequences(size))[0] for size in (1, 2, 4))
    blocks = 4 * (two - four)  # the rest, embedding, logits, what is cut and joined, is full on every rank
    hidden = 512 * 32 * 4
    assert blocks > 0.6 * one
    assert two < one - blocks / 2 + 3 * hidden


def given_pieces() -> dict[str, float]:
    """One step of a model that is given pieces, against one process: mean loss and gradients."""
    torch.manual_seed(0)
    alone, model = models.Whole(), models.Whole()
    model.load_state_dict(alone.state_dict())
    model = fsdplaunch.prepare(model)
    ids = models.batch(0)[:1, :].expand(2, -1)
    inputs, labels = ids[:, :-4], ids[:, 1:-3]
    positions = torch.arange(inputs.size(1)).unsqueeze(0)
    nn.functional.cross_entropy(alone(inputs, positions).flatten(0, 1), labels.flatten()).backward()
    with fsdplaunch.context_parallel(model, inputs, labels, positions) as (mine, own_labels, places):
        logits = model(mine, places)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), own_labels.flatten())
    loss.backward()
    grads = {name: param.grad.full_tensor() for name, param in fsdplaunch.named_parameters(model)}
    wanted = {name: param.grad for name, param in alone.named_parameters()}
    return {"gradients": models.difference(grads, wanted), "positions": logits.size(1)}


def test_a_script_may_split_all_of_a_model_itself(four_ranks: RankPool) -> None:
    for context, extra in ((4, {}), (2, {"FSDP_ACTIVATION_CHECKPOINTING": "true"})):
        for result in four_ranks.run(given_pieces, env=sequences(context, **extra)):
            assert result["positions"] == 8 // context
            assert result["gradients"] < 1e-6
