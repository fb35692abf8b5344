"""Lightning: a module with its Trainer; argument: a strategy, over two workers."""

import sys

import lightning
import torch
from torch import nn


class Regression(lightning.LightningModule):
    """Four layers and their optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

    def training_step(self, batch, _):
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
loader = torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=8)
strategy = {"strategy": sys.argv[1], "devices": 2} if len(sys.argv) > 1 else {}
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    **strategy,
)
trainer.fit(Regression(), loader)
trainer.save_checkpoint("out-lightning/final.pt")
