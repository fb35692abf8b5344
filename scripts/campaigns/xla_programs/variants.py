"""Train what is easily got wrong on devices, beside the same model on the CPU; print how far they are apart.

Batches that devices do not divide, tied and frozen parameters, dropout after loading, gradients
clipped by a generator of parameters, and the names of the wrapper's arguments.
"""

import inspect
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from save_and_load import Net
from torch import nn

import fsdplaunch
from fsdplaunch.config.environment import decode
from fsdplaunch.config.schema.sharding_sections import parse_xla_settings

BATCHES = (8, 6, 1, 3)


def built(*, tied: bool = False, frozen: bool = False, drop: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if tied:
        model.head.weight = model.embed.weight
    if frozen:
        for module in (model.embed, *(block.up for block in model.blocks)):
            module.requires_grad_(False)
    if drop:
        model.blocks.append(nn.Dropout(drop))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, clip: Callable, rows: int = 8) -> float:
    x = torch.randint(17, (rows, 6), generator=torch.Generator().manual_seed(number))
    logits = model(x)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ((x * 3 + 1) % 17).to(logits.device).flatten())
    loss.backward()
    clip(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def on_cpu(model: nn.Module, max_norm: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def by_generator(model: nn.Module, max_norm: float) -> None:
    fsdplaunch.clip_grad_norm_(model.parameters(), max_norm)


def apart(one: Iterable[float], other: Iterable[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def beside_cpu(clip: Callable = fsdplaunch.clip_grad_norm_, **kinds: bool) -> float:
    plain, model = built(**kinds), built(**kinds)
    trains = optimizer_of(plain)
    model, optimizer = fsdplaunch.prepare(model, optimizer_of(model))
    steps = list(enumerate(BATCHES))
    expected = [step(plain, trains, number, on_cpu, rows) for number, rows in steps]
    return apart(expected, [step(model, optimizer, number, clip, rows) for number, rows in steps])


def dropout_goes_on() -> float:
    model = built(drop=0.5)
    model, optimizer = fsdplaunch.prepare(model, optimizer_of(model))
    step(model, optimizer, 0, fsdplaunch.clip_grad_norm_)
    fsdplaunch.save_checkpoint("dropout", model=model, optimizer=optimizer)
    after = [step(model, optimizer, number, fsdplaunch.clip_grad_norm_) for number in (1, 2)]
    fsdplaunch.load_checkpoint("dropout", model=model, optimizer=optimizer)
    return apart(after, [step(model, optimizer, number, fsdplaunch.clip_grad_norm_) for number in (1, 2)])


def unknown_arguments() -> int:
    """How many arguments of torch_xla's class a file cannot hold although they are not functions."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    count = 0
    parameters = inspect.signature(XlaFullyShardedDataParallel.__init__).parameters
    for name in set(parameters) - {"self", "module", "args", "kwargs"}:
        try:
            parse_xla_settings({name: None})
        except ValueError:
            count += "Callable" not in str(parameters[name].annotation)
    return count


print("batches", f"{beside_cpu():.7f}")
print("tied", f"{beside_cpu(tied=True):.7f}")
print("frozen", f"{beside_cpu(frozen=True):.7f}")
print("dropout", f"{dropout_goes_on():.7f}")
print("arguments", f"{unknown_arguments():.1f}")
if decode().fsdp_config.xla_fsdp_v2:
    print("generator", f"{beside_cpu(by_generator):.7f}")
