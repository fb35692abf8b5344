"""Sequences that ranks split compute what one process does, in less memory; what cannot be split is refused."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdplaunch
from fsdplaunch.runtime.split.split_blocks import attend, own_piece, split_blocks
from fsdplaunch.runtime.torch_internals import tensors
from tests.distributed import split_models as models
from tests.distributed.pool import RankPool
from tests.distributed.test_tensor_parallel import against_one, variables
from tests.distributed.tiny import words_of


def sequences(context: int, tensor: int = 1, name: str = "", **more: str) -> dict[str, str]:
    """What a launch with cp_size sets."""
    plan = models.MODELS[name][1] if tensor > 1 else None
    return variables(tensor, plan, PARALLELISM_CONFIG_CP_SIZE=str(context), **more)


RING = {"FSDPLAUNCH_SHARDING_CONTEXT_PARALLEL_ATTENTION": "ring"}


@pytest.mark.parametrize(
    ("name", "context", "tensor", "more"),
    [
        ("plain", 2, 2, RING | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}),
        ("llama", 4, 1, RING | {"SPLIT_MODELS_KV_HEADS": "2"}),
        ("gpt2", 2, 1, {}),
    ],
)
def test_a_run_with_split_sequences_is_that_of_one_process(
    four_ranks: RankPool, name: str, context: int, tensor: int, more: dict[str, str]
) -> None:
    result = four_ranks.run(against_one, name, env=sequences(context, tensor, name, **more), timeout=200)[0]
    assert result["learnt"] > 0.01
    assert result["losses"] < 1e-5
    assert result["values"] < 1e-5
    assert result["sequences"] == (context, "ring" if more else "auto")


def the_mask(kind: str, heads: int) -> torch.Tensor | None:
    """A mask of 24 positions: none, added ones of all heads or of each, or which keys may be seen at all."""
    if kind == "keys":
        return torch.arange(24).expand(2, 1, 1, 24) % 5 != 0
    shapes = {"all heads": (2, 1, 24, 24), "each head": (2, heads, 24, 24), "alone": (24, 24)}
    return torch.randn(shapes[kind], requires_grad=True) if kind in shapes else None


def apart(axis: DeviceMesh, way: Any, heads: int, kv_heads: int, mask: str) -> float:
    """How far attention of split sequences is from that of full ones: values, gradients, the mask's as well."""
    torch.manual_seed(0)
    full = [torch.randn(2, each, 24, 8, requires_grad=True) for each in (heads, kv_heads, kv_heads)]
    how: dict[str, Any] = {"is_causal": mask == "causal", "enable_gqa": heads != kv_heads, "scale": 0.5}
    seen, weights = the_mask(mask, heads), torch.randn(2, heads, 24, 8)
    mixed = nn.functional.scaled_dot_product_attention(*full, seen, **how)
    (mixed * weights).sum().backward()
    mine = [own_piece(each.detach(), axis, 2).requires_grad_() for each in full]
    own_mask = None if seen is None else seen.detach().requires_grad_(seen.requires_grad)
    got = attend(axis, way, *mine, own_mask, **how)
    (got * own_piece(weights, axis, 2)).sum().backward()
    found, wanted = [got, *(each.grad for each in mine)], [mixed, *(each.grad for each in full)]
    distances = [(one - own_piece(other, axis, 2)).abs().max() for one, other in zip(found, wanted, strict=True)]
    if own_mask is not None and own_mask.grad is not None:
        dist.all_reduce(own_mask.grad)
        distances.append((own_mask.grad - seen.grad).abs().max())
    return float(max(distances))


def attentions() -> dict[str, float]:
    """By heads, way and mask."""
    axis, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for heads, kv_heads, way in ((4, 4, "heads"), (4, 1, "heads"), (3, 3, "auto"), (6, 2, "auto"), (4, 2, "ring")):
        masks = ("all heads", "each head", "alone", "keys") if way == "heads" else ()
        for mask in ("causal", "none", *masks):
            found[f"{way, heads, kv_heads, mask}"] = apart(axis, way, heads, kv_heads, mask)
    return found


def test_attention_is_exact_by_heads_and_by_ring(two_ranks: RankPool, four_ranks: RankPool) -> None:
    for found in (*two_ranks.run(attentions), *four_ranks.run(attentions)):
        assert len(found) == 18
        assert max(found.values()) < 1e-5, found


def small_cases() -> dict[str, Any]:
    """What a ring does with autocast, with what no kernel takes, and with gradients of gradients."""
    axis = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    full = [torch.randn(1, 3, 8, 4) for _ in range(3)]
    mine = [own_piece(each, axis, 2).requires_grad_() for each in full]
    with torch.autocast("cpu"):
        low = attend(axis, "ring", *mine, is_causal=True)
    exact = own_piece(nn.functional.scaled_dot_product_attention(*full, is_causal=True), axis, 2)
    ring = partial(words_of, attend, axis, "ring")
    said = words_of(torch.autograd.grad, attend(axis, "ring", *mine).sum(), mine[0], create_graph=True)
    unfit = [(mine[0], mine[1][:, :2], mine[2][:, :2]), (mine[0], mine[1], mine[2][:, :, :1])]
    unfit += [(mine[0], mine[1].double(), mine[2]), (mine[0], mine[1][:, :, :1], mine[2][:, :, :1])]
    seen = torch.ones(8, 8, dtype=torch.bool)
    with sdpa_kernel(SDPBackend.MATH):
        refused = [ring(*mine)]
    refused += [ring(*mine, **how) for how in ({"attn_mask": seen}, {"dropout_p": 0.5})]
    return {
        "unfit": [ring(*case, is_causal=True) for case in unfit],
        "refused": refused,
        "autocast": (str(low.dtype), float((low - exact).abs().max())),
        "second gradient": said,
    }


def test_a_ring_casts_and_refuses_what_it_cannot_compute(four_ranks: RankPool) -> None:
    for found in four_ranks.run(small_cases):
        assert all("query, key and value do not match" in text for text in found["unfit"][:3]), found
        assert "causal ring attention of 2 positions to 1 is not possible" in found["unfit"][3]
        for text, why in zip(found["refused"], ("no kernel", "with a mask", "with dropout"), strict=True):
            assert why in text
        assert found["autocast"][0] == "torch.bfloat16"
        assert found["autocast"][1] < 0.05
        assert "the gradient of a gradient cannot be computed through ring attention" in found["second gradient"]


@pytest.mark.parametrize("name", ["FLASH", "EFFICIENT"])
def test_kernels_of_gpus_take_what_they_are_given(name: str) -> None:
    """On tensors without values, by which torch knows what a kernel takes and returns: tests/gpu computes."""
    kernel = getattr(tensors, name)
    query, key = (torch.empty(2, 3, length, 64, device="meta") for length in (100, 60))
    result, sums, more = kernel.forward(query, key, key, False, 0.1)
    assert (result.shape, sums.shape) == (query.shape, query.shape[:-1])
    gradients = kernel.backward(torch.empty_like(result), query, key, key, result, sums, more, False, 0.1)
    assert [each.shape for each in gradients] == [query.shape, key.shape, key.shape]


def compiled_passes() -> float:
    """How far losses of a model that is compiled as a whole are from those of one process."""
    alone, model = models.built("plain"), models.built("plain")
    model, optimizer = fsdplaunch.prepare(model, models.adamw(model))
    losses = models.train(alone, models.adamw(alone), steps=2)
    split = models.train(torch.compile(model, backend="eager"), optimizer, steps=2)
    return max(abs(one - other) for one, other in zip(losses, split, strict=True))


def test_a_model_with_split_sequences_is_compiled_as_a_whole(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(compiled_passes, env=sequences(2), timeout=200)) < 1e-5


def test_sequences_are_cut_at_the_first_numbered_block_not_at_an_embedding() -> None:
    """Encoders of transformers name their embedding among the modules that stay in one piece."""
    model = models.Plain()
    model.front = nn.Sequential(nn.Embedding(4, 4))
    model._no_split_modules = ["Sequential", "Block"]
    axis: Any = None  # nobody computes
    split_blocks(model, (), axis, "auto")
    assert "forward" not in model.front.__dict__
    forwards = [block.__dict__["forward"] for block in model.layers]
    assert [(each.first, each.last) for each in forwards] == [(True, False), (False, True)]


class Counting(models.Block):
    """A block that counts positions itself, from 0 on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.arange(x.size(1)).unsqueeze(-1) * torch.linspace(0, 0.1, 32))


class Shifting(models.Block):
    """A block that mixes neighbours without attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.roll(1, 1))


class Alone(models.Block):
    """A block with one head."""

    def mask(self, length: int) -> torch.Tensor | None:
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, mask = self.before(x).unsqueeze(1), self.mask(x.size(1))
        mixed: torch.Tensor = nn.functional.scaled_dot_product_attention(q, q, q, mask).squeeze(1)
        return x + mixed


class Masking(Alone):
    """The same with a mask of the positions that it sees."""

    def mask(self, length: int) -> torch.Tensor:
        return torch.ones(length, length).tril()


class Encoder(nn.TransformerEncoderLayer):
    """torch's own block, with a causal mask."""

    def __init__(self) -> None:
        super().__init__(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, nn.Transformer.generate_square_subsequent_mask(x.size(1)), is_causal=True)


def refused(kind: str, length: int) -> str:
    torch.manual_seed(0)
    model = models.Plain()
    if kind != "Block":
        model.layers = nn.ModuleList(globals()[kind]() for _ in range(2))
    model = fsdplaunch.prepare(model)
    ids = models.batch(0)[:, :length]
    return words_of(model, input_ids=ids, labels=ids)


def test_what_cannot_be_split_is_refused_at_the_first_step(four_ranks: RankPool) -> None:
    env = sequences(2)
    for kind in ("Counting", "Shifting"):
        said = four_ranks.run(refused, kind, 12, env=env)
        assert all("computes different values with split sequences (cp_size)" in text for text in said), said
    assert four_ranks.run(refused, "Encoder", 12, env=env) == ["nothing was raised"] * 4
    said = four_ranks.run(refused, "Masking", 12, env=env)
    assert "a mask of (6, 6) is not that of all 12 x 12 positions (cp_size)" in said[0]
    heads = {"FSDPLAUNCH_SHARDING_CONTEXT_PARALLEL_ATTENTION": "heads"}
    said = four_ranks.run(refused, "Alone", 12, env=env | heads)
    assert "1 attention heads cannot be divided by 2 ranks (cp_size)" in said[0]
    said = four_ranks.run(refused, "Block", 11, env=env)
    assert "sequences of 11 cannot be divided by 2 ranks (cp_size)" in said[0]
    said = four_ranks.run(refused, "Block", 2, env=env)
    assert "sequences of 2 leave one position to each of 2 ranks (cp_size)" in said[0]


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
    ring = four_ranks.run(saved_bytes, 512, env=sequences(4, **RING))[0]
    assert 0 < ring < 1.05 * four
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
    with torch.no_grad():
        assert model(inputs, positions).size(1) == inputs.size(1), "not a pass with full sequences"
    loss.backward()
    grads = {name: param.grad.full_tensor() for name, param in fsdplaunch.named_parameters(model)}
    wanted = {name: param.grad for name, param in alone.named_parameters()}
    return {"gradients": models.difference(grads, wanted), "positions": logits.size(1)}


def test_a_script_may_split_all_of_a_model_itself(four_ranks: RankPool) -> None:
    for context, extra in ((4, {}), (2, {"FSDP_ACTIVATION_CHECKPOINTING": "true"})):
        for result in four_ranks.run(given_pieces, env=sequences(context, **extra)):
            assert result["positions"] == 8 // context
            assert result["gradients"] < 1e-6
