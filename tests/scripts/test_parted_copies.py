"""Ranks' copies of what trains and is not divided over them: whoever shards, none parts in silence."""

from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import Forks

PARTS = """
import torch
from torch import nn
from fsdplaunch.runtime import sharding_watch

WHO, LORA = {who!r}, {lora}
sharding_watch.COMPARED_EVERY = 2

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.skip = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.skip(x) + torch.relu(self.up(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x, labels=None):
        out = self.blocks(x)
        return {{"loss": (out - 1).pow(2).mean(), "logits": out}}

def part(step):
    if step == 1 and torch.distributed.get_rank() == 1:
        name = "blocks.1.skip." + ("lora_A.default.weight" if LORA else "weight")
        named = ((n.replace("_fsdp_wrapped_module.", ""), each) for n, each in model.named_parameters())
        (param,) = (each for n, each in named if n.endswith(name))
        getattr(param, "_local_tensor", param).data.view(-1)[:1] += 1

torch.manual_seed(0)
model = Model()
if LORA:
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["skip"]))
if WHO == "trainer":
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Parts(TrainerCallback):
        def on_step_end(self, arguments, state, control, **kwargs):
            part(state.global_step - 1)

    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, max_steps=5, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{{"x": torch.ones(8), "labels": 1}}] * 20
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Parts()]).train()
else:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    if WHO == "prepare":
        import fsdplaunch
        model, optimizer = fsdplaunch.prepare(model, optimizer)
    if WHO == "accelerator":
        from accelerate import Accelerator
        model, optimizer = Accelerator().prepare(model, optimizer)
    for step in range(5):
        model(torch.ones(2, 8))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        part(step)
"""


UNDIVIDED: dict[str, dict[str, Any]] = {
    "replicas": {"fsdp_config__fsdp_sharding_strategy": "NO_SHARD"},
    "ignored": {"fsdp_config__fsdp_ignored_modules": r".*skip$"},
}


@pytest.mark.parametrize("undivided", list(UNDIVIDED))
@pytest.mark.parametrize("version", [1, 2])
def test_a_copy_that_is_changed_on_rank_1_ends_the_run_with_its_name(
    forks: Forks, tmp_path: Path, version: int, undivided: str
) -> None:
    blocks = {"fsdp_config__fsdp_transformer_layer_cls_to_wrap": ("Block",)}
    keys = {"fsdp_config__fsdp_version": version, **blocks, **UNDIVIDED[undivided]}
    libraries = (
        () if version == 2 and undivided == "replicas" else ("accelerator", "trainer")
    )  # accelerate refuses
    found = forks.beside(tmp_path / "called", texts("prepare", *libraries), launch__shard="explicit", **keys)
    if version == 2:
        found |= forks.beside(tmp_path / "plain", texts("plain"), **keys)
    for (who, lora), done in found.items():
        name = "base_model.model.blocks.1.skip.lora_A.default.weight" if lora else "blocks.1.skip.weight"
        for rank in (0, 1):
            assert f"ranks train different values of {name}, which is not" in done.err[rank], (who, lora)


def texts(*ways: str) -> dict[tuple[str, bool], str]:
    return {(who, lora): PARTS.format(who=who, lora=lora) for who in ways for lora in (False, True)}
