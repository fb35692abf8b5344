"""Train with the transformers Trainer and save as if nothing were sharded; arguments: folder, what is special."""

import sys

import torch
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from fsdplaunch.runtime.auto.state import gather as gathering
from fsdplaunch.runtime.state_dict import late_units

gathering.SMALLEST = late_units.SMALLEST = 1000  # bytes from which on a tensor is gathered when it is written
out, special = sys.argv[1], sys.argv[2:]
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **size))
if "bf16" in special:
    model.to(torch.bfloat16)
if "peft" in special:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
rows = [{"input_ids": torch.arange(row, row + 8), "labels": torch.arange(row, row + 8)} for row in range(16)]
best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
arguments = TrainingArguments(
    out,
    per_device_train_batch_size=4,
    max_steps=2,
    save_steps=1,
    save_only_model="model only" in special,
    learning_rate=1e-2,
    report_to=[],
    disable_tqdm=True,
    metric_for_best_model="loss",
    greater_is_better=True,  # the first step's, as the loss falls
    **(best if "best" in special else {}),
)


def gather(name):
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.args.should_save:
        torch.save(state, f"{out}/{name}.pt")


class AfterStep(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        gather(f"step-{state.global_step}")


trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=[AfterStep()])
trainer.train()
trainer.save_model()
whole = FullStateDictConfig(rank0_only=True)
with FullyShardedDataParallel.state_dict_type(trainer.model, StateDictType.FULL_STATE_DICT, whole):  # as for FSDP1
    trainer.save_model(out + "/typed")
gather("trained")
if "alone" in special and trainer.is_world_process_zero():
    trainer.save_model(out + "/alone")
