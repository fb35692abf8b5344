"""A transformers Trainer, in whose arguments no word is of FSDP or XLA."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
config = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
model = BertForSequenceClassification(config)
ids = torch.randint(60, (32, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
arguments = TrainingArguments(
    output_dir="out",
    max_steps=4,
    per_device_train_batch_size=8,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
wrapped = trainer.model_wrapped
print("units", sum(type(module).__name__ == "XlaFullyShardedDataParallel" for module in wrapped.modules()))
for entry in trainer.state.log_history:
    if "loss" in entry:
        print("loss", entry["loss"])
trainer.save_model("out/final")
