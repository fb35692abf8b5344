"""Train with accelerate, and save by every call that its users write; the reference is gathered before by hand."""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import BertConfig, BertForSequenceClassification

from fsdplaunch.runtime.collectives import waits
from fsdplaunch.runtime.state_dict import gather

gather.SMALLEST = 1000  # bytes from which on a gathered tensor is kept in a file
waits.NOTICE_SECONDS, waits.CONFIRM_SECONDS, waits.STILL_SECONDS = 0.5, 0.5, 0.5
out = Path(sys.argv[1])
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
torch.manual_seed(0)
accelerator = Accelerator()
alone_or_all = accelerator.is_main_process or os.environ["FSDP_VERSION"] == "1"  # FSDP1 gathers on all ranks
model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=32, **size))
if os.environ["FSDP_VERSION"] == "1":  # its flat parameters are trained by optimizers that are built on them
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
else:
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for _ in range(2):
    rows = torch.randint(0, 64, (4, 8))
    loss = model(input_ids=rows, labels=torch.tensor([0, 1, 0, 1])).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()

if isinstance(model, FullyShardedDataParallel):
    with FullyShardedDataParallel.summon_full_params(model):
        trained = {name: value.clone() for name, value in model.module.named_parameters()}
else:
    trained = {
        name: value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
        for name, value in model.named_parameters()
    }
marks = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
for mark in marks:
    trained = {name.replace(mark, ""): value.detach() for name, value in trained.items()}

inner = accelerator.unwrap_model(model)
inner.save_pretrained(out / "library", is_main_process=accelerator.is_main_process, save_function=accelerator.save)
inner.save_pretrained(out / "pieces", max_shard_size="20KB")
inner.save_pretrained(
    out / "given", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
)
inner.bert.save_pretrained(out / "part")
accelerator.save_model(model, out / "model", max_shard_size="20KB")
accelerator.save(inner.state_dict(), out / "state.pt")
state = accelerator.get_state_dict(inner)
if alone_or_all:
    accelerator.unwrap_model(model).save_pretrained(out / "alone")
if os.environ["FSDP_VERSION"] == "2" and accelerator.is_main_process:
    alone = accelerator.unwrap_model(model)
    torch.save({"model": alone.state_dict(), "optimizer": optimizer.state_dict()}, out / "alone.pt")
    save_file(alone.state_dict(), out / "alone.st")
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(trained, out / "trained.pt")
    torch.save(state, out / "unwrapped.pt")
    print(sorted(path.name for path in (out / "pieces").iterdir()))
if alone_or_all:
    inner.save_pretrained(out / "alone")
    inner.save_pretrained(out / "alone given", state_dict=accelerator.get_state_dict(model))
    accelerator.save_model(model, out / "alone model")
    inner.bert.save_pretrained(out / "alone part", max_shard_size="20KB")
accelerator.wait_for_everyone()


def save_by_hook(models, weights, folder):
    """Save as diffusers' examples do, by `accelerator.save_state`."""
    if alone_or_all:
        for each in models:
            accelerator.unwrap_model(each).save_pretrained(Path(folder) / "by hook")
            weights.pop()


accelerator.register_save_state_pre_hook(save_by_hook)
accelerator.save_state(out / "checkpoint")
accelerator.wait_for_everyone()
if "wrong" in sys.argv:
    wrong = {name: value.flatten()[:3] for name, value in trained.items()}
    inner.save_pretrained(out / "wrong", state_dict=wrong)
