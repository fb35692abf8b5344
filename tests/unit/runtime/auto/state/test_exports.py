"""`torch.jit.script` compiles under the hooks what it does without them; draws that are not equal are told."""

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.data.local_batches import LocalBatches
from fsdplaunch.runtime.auto.data.row_order import telling_row_orders
from fsdplaunch.runtime.auto.data.row_statistics import telling_row_statistics
from fsdplaunch.runtime.auto.dtensor.function_table import handling_shards
from fsdplaunch.runtime.auto.model.batch_norm import normalising_global_batch
from fsdplaunch.runtime.auto.rng.global_draws import drawing_for_global_batch
from fsdplaunch.runtime.auto.state.exports import exporting_full_models

HOOKS = (
    handling_shards,
    drawing_for_global_batch,
    normalising_global_batch,
    telling_row_orders,
    telling_row_statistics,
    exporting_full_models,
)


@pytest.fixture(autouse=True)
def _hooked() -> Iterator[None]:
    data, rows = SimpleNamespace(rank=0, size=2), LocalBatches()
    context: Any = SimpleNamespace(
        keeps_batch=True,
        size=2,
        data=data,
        streams=SimpleNamespace(alike=True, draws_own=False, seed_offset=0),
        ownership=SimpleNamespace(ours=True),
        batches=rows,
        models=[],
        when_sharded=[],
        printed=set(),
    )
    messages.unequal.clear()
    with ExitStack() as stack:
        for hook in HOOKS:
            stack.enter_context(hook(context))
        yield
    messages.unequal.clear()


def test_a_scripted_class_finds_the_names_around_it() -> None:
    """As torch's own functional optimizers need, which `torch.distributed.optim` makes when it is imported."""

    @torch.jit.script
    def twice(x: int) -> int:
        return 2 * x

    @torch.jit.script
    class Counter:
        def __init__(self) -> None:
            self.count = 3

        def more(self) -> int:
            self.count = twice(self.count)
            return self.count

    assert Counter().more() == 6


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand([2]) + torch.randn([2]) + torch.randint(0, 4, [2])


def noise_like(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 4) + torch.zeros_like(x)


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(x) + torch.normal(x, x) + torch.multinomial(x, 2) + torch.poisson(x)


def ordered(x: torch.Tensor) -> torch.Tensor:
    return torch.roll(torch.flip(x, [0]), 1) + torch.randperm(2) + torch.unbind(torch.eye(2))[0]


def reduced(x: torch.Tensor) -> torch.Tensor:
    return (
        torch.norm(x) + torch.sum(x) + torch.mean(x) + torch.max(x) + torch.amax(x) + torch.linalg.vector_norm(x)
    )


def joined(x: torch.Tensor) -> torch.Tensor:
    below = torch.cat([x, x]) + torch.concat([x, x]) + x.repeat(2)
    return below + torch.vstack([x, x]).view(-1) + below.bernoulli(0.5) + below.multinomial(4)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(torch.stack([x, 2 * x]), None, None, training=True)


@pytest.mark.parametrize("function", [noise, noise_like, drawn, ordered, reduced, joined, normalised])
def test_scripted_code_may_name_the_functions_that_are_hooked(function: Any) -> None:
    x = torch.tensor([0.25, 0.75])
    torch.manual_seed(0)
    one = torch.jit.script(function)(x)
    torch.manual_seed(0)

    assert torch.equal(one, function(x))


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(2), nn.InstanceNorm1d(2), nn.Dropout(), nn.LSTM(2, 2, 2), nn.GRU(2, 2), nn.RNN(2, 2)]
)
def test_modules_of_torch_are_scripted(module: nn.Module) -> None:
    assert isinstance(torch.jit.script(module), torch.jit.ScriptModule)


def test_draws_of_scripted_code_are_told_where_the_global_batch_is_kept() -> None:
    torch.jit.script(noise_like)
    assert messages.unequal == []

    torch.jit.script(drawn)
    assert [line.split(", ")[1] for line in messages.unequal] == [
        f"{name} computes for each rank's own rows" for name in ("bernoulli", "multinomial", "poisson")
    ]
