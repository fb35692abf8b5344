"""What transformers' Trainer takes in one process only: evaluation before training."""

from pathlib import Path

import pytest

from tests.scripts.conftest import Forks

BLOCKS = {"fsdp_config__fsdp_transformer_layer_cls_to_wrap": ("Block",)}
EVALUATES_FIRST = """
import os
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.up(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 1)

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x)
        out = self.head(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

torch.manual_seed(0)
drawn = torch.randn(8, 9, generator=torch.Generator().manual_seed(1))
data = [{"x": row[:8], "labels": row[8]} for row in drawn]
size = 4 // int(os.environ.get("WORLD_SIZE", "1"))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=size, per_device_eval_batch_size=size, max_steps=3, learning_rate=0.05,
    report_to=[], save_strategy="no", use_cpu=True, average_tokens_across_devices=False, disable_tqdm=True,
)
trainer = Trainer(model=Model(), args=arguments, train_dataset=data, eval_dataset=data)
for evaluate in (True, False, True):
    print("loss", trainer.evaluate()["eval_loss"] if evaluate else trainer.train().training_loss)
"""


@pytest.mark.parametrize("version", [1, 2])
def test_losses_are_those_of_one_process(forks: Forks, tmp_path: Path, version: int) -> None:
    plain = forks.run(EVALUATES_FIRST, tmp_path / "plain")
    run = forks.passes(EVALUATES_FIRST, tmp_path / "run", ranks=2, fsdp_config__fsdp_version=version, **BLOCKS)
    assert len(plain.losses()) == 3
    assert run.losses() == pytest.approx(plain.losses(), abs=1e-5)
