"""sentence-transformers: its Trainer on pairs of sentences, and its final model."""

from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)

torch.manual_seed(0)
words = models.Transformer("encoder")
model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())])
texts = Path("corpus/train.txt").read_text().split("\n")
scores = [number % 5 / 5 for number in range(len(texts))]
pairs = Dataset.from_dict({"sentence1": texts, "sentence2": texts[::-1], "score": scores})
arguments = SentenceTransformerTrainingArguments(
    "out-sentences",
    per_device_train_batch_size=8,
    max_steps=4,
    learning_rate=1e-3,
    save_strategy="steps",
    save_steps=2,
    report_to=[],
    use_cpu=True,
    seed=1,
)
trainer = SentenceTransformerTrainer(
    model, arguments, train_dataset=pairs, loss=losses.CosineSimilarityLoss(model)
)
trainer.train()
trainer.save_model()
