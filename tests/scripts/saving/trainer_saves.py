"""Train with the transformers Trainer and save as if nothing were sharded; argument: the folder."""

import sys

import torch
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **size))
rows = [{"input_ids": torch.arange(row, row + 8), "labels": torch.arange(row, row + 8)} for row in range(16)]
arguments = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=4,
    max_steps=2,
    save_steps=1,
    learning_rate=1e-2,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
trainer.save_model()
whole = FullStateDictConfig(rank0_only=True)
with FullyShardedDataParallel.state_dict_type(trainer.model, StateDictType.FULL_STATE_DICT, whole):  # as for FSDP1
    trainer.save_model(sys.argv[1] + "/typed")
state = trainer.accelerator.get_state_dict(trainer.model)
if trainer.args.should_save:
    torch.save(state, sys.argv[1] + "/trained.pt")
