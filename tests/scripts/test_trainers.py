"""What accelerate and its Trainer take in one process only: evaluation before training, several models at once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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


IGNORED = {"fsdp_config__fsdp_ignored_modules": r".*0\.up$"}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("program", "keys"),
    [(EVALUATES_FIRST, {}), (EVALUATES_FIRST, IGNORED), (TWO_MODELS, {})],
    ids=["evaluate before train", "ignored modules", "two models"],
)
def test_losses_are_those_of_one_process(
    forks: Forks, tmp_path: Path, program: str, keys: dict[str, str], version: int
) -> None:
    plain = forks.passes(program, tmp_path / "plain")
    run = forks.passes(program, tmp_path / "run", ranks=2, fsdp_config__fsdp_version=version, **BLOCKS, **keys)
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
model = nn.Sequential(nn.Linear(8, 8), Block(), Block())
if sys.argv[1] == "adapters":  # the first layer is frozen, in a unit that trains nothing
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
if sys.argv[2] == "wrong":
    from accelerate.utils import load_fsdp_model
    load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, "../state", adapter_only=True)
accelerator.load_state("../state")
for _ in range(3):
    print("loss", train())
"""


@pytest.mark.parametrize(
    ("version", "kind", "ranks"),
    [
        (1, "SHARDED_STATE_DICT", 2),
        (1, "FULL_STATE_DICT", 2),
        (1, "FULL_STATE_DICT", 1),
        (2, "SHARDED_STATE_DICT", 2),
        (2, "FULL_STATE_DICT", 2),
    ],
)
@pytest.mark.parametrize("what", ["all", "adapters"])
def test_accelerate_resumes_with_the_state_of_its_optimizer(
    forks: Forks, tmp_path: Path, what: str, version: int, kind: str, ranks: int
) -> None:
    keys = {"fsdp_config__fsdp_version": version, "fsdp_config__fsdp_state_dict_type": kind, **BLOCKS}
    first = forks.passes(RESUMES, tmp_path / "first", what, "first", ranks=ranks, **keys)
    again = forks.passes(RESUMES, tmp_path / "again", what, "again", ranks=ranks, **keys)
    assert len(first.losses()) == 3
    assert again.losses() == first.losses()


def test_a_checkpoint_without_the_adapters_is_not_loaded(forks: Forks, tmp_path: Path) -> None:
    keys = {"fsdp_config__fsdp_version": 1, "fsdp_config__fsdp_state_dict_type": "FULL_STATE_DICT", **BLOCKS}
    forks.passes(RESUMES, tmp_path / "first", "all", "first", ranks=2, **keys)
    again = forks.run(RESUMES, tmp_path / "again", "adapters", "wrong", ranks=2, **keys)
    assert again.codes == [1, 1]
    assert "the checkpoint has none of the parameters that train" in again.err[0]


TIED = """
import torch
from accelerate import Accelerator
from torch import nn

class Block(nn.Linear):
    pass

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(8, 4), Block(4, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.block(self.embed(x)))

accelerator, model = Accelerator(), Model()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
model(torch.arange(8)).sum().backward()
optimizer.step()
accelerator.save_model(model, "weights")
accelerator.save_state("state")
"""


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_saves_tied_weights_once(forks: Forks, tmp_path: Path, version: int, kind: str) -> None:
    keys = {"fsdp_config__fsdp_version": version, "fsdp_config__fsdp_state_dict_type": kind, **BLOCKS}
    folder = forks.passes(TIED, tmp_path / "run", ranks=2, **keys).folder
    names = set(load_file(folder / "weights/model.safetensors"))
    assert names in ({"block.weight", "block.bias", each} for each in ("head.weight", "embed.weight"))
    if kind == "FULL_STATE_DICT":
        full = torch.load(folder / "state/pytorch_model_fsdp.bin")
        assert full["head.weight"].data_ptr() == full["embed.weight"].data_ptr()
