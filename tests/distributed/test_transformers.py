"""Models of transformers may recompute activations in their own way, and with our wrappers."""

from typing import Any

import pytest
import torch

import fsdplaunch
from fsdplaunch.runtime.inspection import clean_name
from tests.distributed.pool import RankPool
from tests.distributed.tiny import plugin

pytest.importorskip("transformers", reason="transformers is a development dependency")


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options))


def ids() -> torch.Tensor:
    return torch.arange(40).reshape(2, 20) % 64


def loss(model: Any) -> float:
    return model(input_ids=ids(), labels=ids()).loss.item()


def trained(fields: dict[str, Any], own_checkpointing: bool) -> tuple[list[float], list[float], list[str]]:
    def train(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for _ in range(5):
            out = model(input_ids=ids(), labels=ids())
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out.loss.item())
        return losses

    alone = llama(tie_word_embeddings=True)
    expected = train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2))
    model = llama(tie_word_embeddings=True)
    if own_checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fsdplaunch.prepare(model, optimizer, plugin=plugin(**fields))
    return (
        expected,
        train(model, optimizer),
        [clean_name(n) for n, m in model.named_modules() if "Checkp" in repr(type(m))],
    )


@pytest.mark.parametrize(("version", "own"), [(1, True), (2, False), (2, True)])
def test_checkpointing_is_the_models_own_or_ours_never_both(two_ranks: RankPool, version: int, own: bool) -> None:
    fields = {"fsdp_version": version, "activation_checkpointing": True}
    expected, losses, wrapped = two_ranks.run(trained, fields, own)[0]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert bool(wrapped) is not own
