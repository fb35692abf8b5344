"""Fine-tuning a transformers model with a hand-written loop and save_pretrained."""

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup, set_seed

set_seed(42)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


class Tokens(Dataset):
    def __init__(self, count, length):
        self.ids = torch.randint(0, 64, (count, length))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    tie_word_embeddings=True,
    attn_implementation="eager",
)
model = LlamaForCausalLM(config)
model.to(device)
train_loader = DataLoader(Tokens(16, 12), batch_size=8, shuffle=True)
eval_loader = DataLoader(Tokens(6, 12), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
epochs = 2
total_steps = len(train_loader) * epochs
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=total_steps)
print(f"training {sum(p.numel() for p in model.parameters())} parameters for {total_steps} steps")

for epoch in range(epochs):
    model.train()
    for batch in train_loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.6f} lr {scheduler.get_last_lr()[0]:.2e}")
    model.eval()
    total = 0.0
    for batch in eval_loader:
        with torch.no_grad():
            total += model(**{k: v.to(device) for k, v in batch.items()}).loss.item()
    print(f"epoch {epoch} eval loss {total / len(eval_loader):.6f}")

print(
    model.generate(torch.ones(1, 2, dtype=torch.long, device=device), max_new_tokens=4, do_sample=False).tolist()
)
model.save_pretrained("finetuned")
