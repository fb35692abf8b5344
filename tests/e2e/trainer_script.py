"""A script of the transformers Trainer, with the end that its FSDP guide asks for; argument: the output folder."""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=64, **size))
rows = [{"input_ids": torch.randint(0, 64, (8,)), "labels": row % 2} for row in range(16)]
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, max_steps=2, save_steps=1, report_to=[], disable_tqdm=True
)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
if trainer.is_fsdp_enabled:
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
trainer.save_model(sys.argv[1])
print(trainer.accelerator.distributed_type, type(trainer.model_wrapped).__name__)
