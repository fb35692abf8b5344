"""Train a small decoder-only transformer on bytes of text, sharded as fsdp.yaml says.

    fsdplaunch launch train_lm.py [--data FILE ...] [--steps 120] [--output checkpoints/lm] [--save-every N]

Plain PyTorch except for the calls of fsdplaunch: prepare, clip_grad_norm_, save_checkpoint, and load_checkpoint
and should_stop for runs that may be interrupted. Without --data it reads the sources of the running Python's own
standard library. With --save-every it goes on from the newest checkpoint, and saves before it is stopped.
"""

import argparse
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fsdplaunch

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
        raise SystemExit(f"train_lm.py: {len(data)} bytes of text are too few, give at least {128 * CONTEXT + 1}")
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
    """Mean loss over all windows; every rank computes all of it, for sharded modules run on all ranks at once."""
    losses = [loss_of(model, batch, device) for batch in DataLoader(windows, batch_size=16)]
    return torch.stack(losses).mean().item()


def resume(folder: Path, training_state: dict[str, object]) -> int:
    """Load the newest complete checkpoint in a folder; the number of steps that were made before it."""
    try:
        state = fsdplaunch.load_checkpoint(folder, **training_state)
    except FileNotFoundError:  # the first start
        return 0
    return state["step"]


def save_if_due(args: argparse.Namespace, step: int, training_state: dict[str, object]) -> bool:
    """Save every so many steps and when the run was asked to stop; whether it was."""
    stop = fsdplaunch.should_stop()  # the same answer on all ranks
    if stop or step % args.save_every == 0:
        fsdplaunch.save_checkpoint(args.output, step=step, **training_state)
    return stop


def epochs(loader: DataLoader) -> Iterator[Tensor]:
    """Batches without end."""
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="text files [standard library sources]")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=Path("checkpoints/lm"))
    parser.add_argument("--save-every", type=int, help="steps between checkpoints, from which a new start goes on")
    args = parser.parse_args()

    torch.manual_seed(0)
    training, evaluation = read_text(args.data)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(training, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = fsdplaunch.prepare(model, optimizer, loader)
    on_gpu = torch.cuda.is_available()  # offloaded parameters are in host memory, and compute on the GPU
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else next(model.parameters()).device

    main_rank = dist.get_rank() == 0
    training_state = {"model": model, "optimizer": optimizer, "loader": loader}
    done = resume(args.output, training_state) if args.save_every else 0
    if main_rank and done:
        print(f"resumed after step {done}", flush=True)
    before = evaluate(model, evaluation, device)
    if main_rank:
        print(f"evaluation loss before training: {before:.6f}", flush=True)
    start, batches = time.time(), epochs(loader)
    for step in range(done + 1, args.steps + 1):
        batch = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(step / 20, 1 - (step - 1) / args.steps)
        loss = loss_of(model, batch, device)
        loss.backward()
        norm = fsdplaunch.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if main_rank and (step % 50 == 0 or step == args.steps):
            rate = (step - done) * batch.numel() * dist.get_world_size() / (time.time() - start)
            print(f"step {step}  loss {loss.item():.3f}  norm {float(norm):.2f}  {rate:.0f} bytes/s", flush=True)
        if args.save_every and step < args.steps and save_if_due(args, step, training_state):
            return  # status 0: the launcher, which passed the signal on, ends with 75
    after = evaluate(model, evaluation, device)
    last = args.steps if args.save_every else None  # a number makes it checkpoint-120 among the others
    checkpoint = fsdplaunch.save_checkpoint(args.output, step=last, **training_state)
    if main_rank:
        print(f"evaluation loss after training: {after:.6f}")
        print(f"checkpoint: {checkpoint}", flush=True)


if __name__ == "__main__":
    main()
