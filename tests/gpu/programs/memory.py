"""Train a model of some 200 million parameters for three steps; print the peak of a rank's GPU memory.

Argument: `oom`, to build one that no GPU holds.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import fsdplaunch

WIDTH, LAYERS, WORDS, LENGTH, ROWS = 1024, 12, 8192, 512, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    """Train, and print what rank 0 has measured."""
    model = Model()
    model, optimizer = fsdplaunch.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    if sys.argv[1:] == ["oom"]:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    ids = torch.randint(WORDS, (ROWS, LENGTH), device="cuda")
    for _ in range(3):
        nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(json.dumps({"peak": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main()
