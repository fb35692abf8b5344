"""What accelerate and its Trainer take in one process only: evaluation before training, several models at once."""

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


TWO_MODELS = """
import torch
from accelerate import Accelerator
from torch import nn

class Block(nn.Linear):
    pass

torch.manual_seed(0)
one, other = (nn.Sequential(Block(4, 4), Block(4, 4)) for _ in range(2))
of_one, of_other = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (one, other))
one, other, of_one, of_other = Accelerator().prepare(one, other, of_one, of_other)
for step in range(3):
    loss = (other(one(torch.ones(2, 4))) - 1).pow(2).mean()
    loss.backward()
    for optimizer in (of_one, of_other):
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item())
"""


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("program", [EVALUATES_FIRST, TWO_MODELS], ids=["evaluate before train", "two models"])
def test_losses_are_those_of_one_process(forks: Forks, tmp_path: Path, program: str, version: int) -> None:
    plain = forks.run(program, tmp_path / "plain")
    run = forks.passes(program, tmp_path / "run", ranks=2, fsdp_config__fsdp_version=version, **BLOCKS)
    assert len(plain.losses()) == 3
    assert run.losses() == pytest.approx(plain.losses(), abs=1e-5)


RESUMES = """
import sys
import torch
from accelerate import Accelerator
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.lin(x) * self.scale

torch.manual_seed(0)
model = nn.Sequential(Block(), Block())
adapters = sys.argv[1] == "adapters"
if adapters:
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["lin"], init_lora_weights=False))
accelerator = Accelerator()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
model, optimizer = accelerator.prepare(model, optimizer)

def train():
    loss = (model(torch.ones(2, 8)) - 2).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

if sys.argv[2] == "first":
    train(), train()
    accelerator.save_state("../state")
    accelerator.load_state("../state")
else:
    accelerator.load_state("../state")
for _ in range(3):
    print("loss", train())
"""


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("what", ["all", "adapters"])
def test_accelerate_resumes_under_fsdp1_with_the_state_of_its_optimizer(
    forks: Forks, tmp_path: Path, what: str, kind: str
) -> None:
    keys = {"fsdp_config__fsdp_version": 1, "fsdp_config__fsdp_state_dict_type": kind, **BLOCKS}
    first = forks.passes(RESUMES, tmp_path / "first", what, "first", ranks=2, **keys)
    again = forks.passes(RESUMES, tmp_path / "again", what, "again", ranks=2, **keys)
    assert len(first.losses()) == 3
    assert again.losses() == first.losses()
