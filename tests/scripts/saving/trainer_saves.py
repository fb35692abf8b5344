"""Train with the transformers Trainer and save as if nothing were sharded; arguments: folder, what is special."""

import sys

import torch
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from fsdplaunch.runtime.compat import hugging_face
from fsdplaunch.runtime.patch import wrap
from fsdplaunch.runtime.state_dict import gather as gathering

gathering.SMALLEST = 1000  # bytes from which on a gathered tensor is kept in a file
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


class OwnSaves(Trainer):
    """Writes the model as sentence-transformers' does, and a part of it alone."""

    def _save(self, output_dir=None, state_dict=None):
        self.model.save_pretrained(output_dir)
        torch.save(self.model.model.embed_tokens.state_dict(), f"{output_dir}/part.pt")


class Older(Trainer):
    """Saves as transformers 4 does: writes on the ranks that do."""

    def save_model(self, output_dir=None, _internal_call=False):
        if "FULL_STATE_DICT" in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            state = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=state)


wrap(Older, "save_model", hugging_face._save_model)
kind = OwnSaves if "own saves" in special else Older if "older" in special else Trainer
trainer = kind(model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=[AfterStep()])
trainer.train()
trainer.save_model()
whole = FullStateDictConfig(rank0_only=True)
with FullyShardedDataParallel.state_dict_type(trainer.model, StateDictType.FULL_STATE_DICT, whole):  # as for FSDP1
    trainer.save_model(out + "/typed")
gather("trained")
if "alone" in special and trainer.is_world_process_zero():
    trainer.save_model(out + "/alone")
