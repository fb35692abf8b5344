"""Train a small decoder-only transformer on bytes of text: a script for one process, with nothing of this package.

    python plain_lm.py [--data FILE ...] [--steps 60] [--output lm.pt]
    fsdplaunch launch plain_lm.py ...                                  the same, sharded over all workers

Without --data it reads the sources of the running Python's own standard library.
"""

import argparse
import itertools
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # bytes
DIM, LAYERS, HEADS, CONTEXT = 128, 4, 4, 128


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        frequencies = 10_000.0 ** (-torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS))
        angles = torch.outer(torch.arange(CONTEXT), frequencies)  # [CONTEXT, head_dim / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Turn pairs of channels of x [batch, heads, time, head_dim] by an angle that grows with time."""
        cos, sin = self.cos[: x.shape[2]].to(x.dtype), self.sin[: x.shape[2]].to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, _ = x.shape
        q, k, v = (t.view(batch, time_, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time_, DIM))


class Block(nn.Module):
    """One layer: attention, then a SwiGLU feed-forward, each on a normalised residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.gate, self.up = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, 3 * DIM, bias=False)
        self.down = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """Bytes [batch, time] in, logits [batch, time, 256] out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Windows(Dataset):
    """Windows of CONTEXT + 1 bytes: input and, one byte later, target."""

    def __init__(self, data: Tensor, numbers: list[int]) -> None:
        self.data, self.numbers = data, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        start = self.numbers[index] * CONTEXT
        return self.data[start : start + CONTEXT + 1].long()


def read_text(files: list[Path]) -> tuple[Windows, Windows]:
    """Read files (the standard library's sources without any); 64 windows, evenly spread, are for evaluation."""
    files = files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    windows = (len(data) - 1) // CONTEXT
    if windows < 128:
        raise SystemExit(f"plain_lm.py: {len(data)} bytes of text are too few, give at least {128 * CONTEXT + 1}")
    held_out = {number * windows // 64 for number in range(64)}
    training = [number for number in range(windows) if number not in held_out]
    return Windows(data, training), Windows(data, sorted(held_out))


def loss_of(model: nn.Module, batch: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Mean cross-entropy in nats per byte of batch [batch, CONTEXT + 1]."""
    batch = batch.to(device)
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, windows: Windows, device: torch.device | str = "cpu") -> float:
    """Mean loss over all windows."""
    model.eval()
    losses = [loss_of(model, batch, device) for batch in DataLoader(windows, batch_size=16)]
    model.train()
    return torch.stack(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="text files [standard library sources]")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=Path("lm.pt"))
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, evaluation = read_text(args.data)
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1 - step / args.steps)
    )
    loader = DataLoader(training, batch_size=args.batch_size, shuffle=True, drop_last=True)

    print(f"evaluation loss before training: {evaluate(model, evaluation, device):.6f}", flush=True)
    start = time.time()
    for step, batch in enumerate(itertools.islice(loader, args.steps), 1):
        loss = loss_of(model, batch, device)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.3f}  norm {norm:.2f}  {time.time() - start:.0f} s", flush=True)
    print(f"evaluation loss after training: {evaluate(model, evaluation, device):.6f}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.output)
    print(f"saved {args.output}", flush=True)


if __name__ == "__main__":
    main()
