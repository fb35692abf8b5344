"""Models that compare rows of the batch in their own forward are told from those that do not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdplaunch.runtime.auto.losses.mixing_models import mixing_operation
from fsdplaunch.runtime.auto.model.batch_norm import _SumOverRanks

ROWS = 8
Middle = Callable[[torch.Tensor], torch.Tensor]


def found(middle: Middle) -> str:
    """Return what is found between two layers, of rows with 5 places and 6 features."""
    first, last = nn.Linear(6, 6), nn.LazyLinear(3)
    return mixing_operation([last(middle(first(torch.randn(ROWS, 5, 6)).relu())).grad_fn], ROWS)


def normed(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("middle", "name"),
    [
        (normed, "Var"),
        (lambda x: normed(x.flatten(0, 1)), "Var"),
        (lambda x: x / torch.std_mean(x, (0, 1))[0], "StdMean"),
        (lambda x: x - x.mean(), "Mean"),
        (lambda x: x + x.view(4, 2, 5, 6).std(0).mean(), "Std"),
        (lambda x: x.softmax(0), "Softmax"),
        (lambda x: (x[:, 0] @ x[:, 1].t()).softmax(-1) @ x[:, 2], "Mm"),
        (lambda x: checkpoint(normed, x, use_reentrant=False), "Var"),
    ],
    ids=["norm", "flat norm", "channels", "all", "groups of rows", "softmax", "attention", "checkpoint"],
)
def test_operations_on_several_rows_are_found(middle: Middle, name: str) -> None:
    assert found(middle) == name


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: F.layer_norm(x, (6,)),
        lambda x: x * x.pow(2).mean(-1, keepdim=True).rsqrt(),
        lambda x: x.mean(1),
        lambda x: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
        lambda x: x.transpose(0, 1).mean(0),
        lambda x: torch.stack([x, x + 1]).mean(0),
        lambda x: x.flatten(0, 1).view(ROWS, 5, 6).max(1)[0],
        nn.BatchNorm1d(5),
        lambda x: x * nn.Parameter(torch.randn(ROWS, 6)).norm(dim=0),
        lambda x: x - _SumOverRanks.apply(x.sum((0, 1))),  # type: ignore[no-untyped-call]
    ],
    ids=[
        *("layer norm", "rms norm", "pooling", "group norm", "attention", "attention by hand"),
        *("time first", "two views", "maximum", "batch norm", "weights", "all ranks"),
    ],
)
def test_operations_on_each_row_are_not(middle: Middle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    assert found(middle) == ""


def test_reductions_of_the_loss_itself_are_known() -> None:
    out = nn.Linear(6, 3)(torch.randn(ROWS, 6))
    value = out.mean(0)
    assert mixing_operation([value.grad_fn], ROWS) == "Mean"
    assert mixing_operation([value.grad_fn], ROWS, [value.grad_fn]) == ""
