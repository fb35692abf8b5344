"""Losses that compare rows of the batch are told from those that do not, whatever the shape of the outputs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fsdplaunch.runtime.auto.losses.graph import read_graph
from fsdplaunch.runtime.auto.losses.row_mixing import compares_rows, fixed_rows, mark_outputs, outputs_of_models

ROWS = 4
X, Y, LABELS = torch.randn(ROWS, 6), torch.randn(ROWS, 6), torch.arange(ROWS)
Loss = Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


def centred(out: torch.Tensor) -> torch.Tensor:
    return out - out.mean(0)


def mixes(loss: Loss) -> bool:
    torch.manual_seed(0)
    net = nn.Linear(6, 6)

    def model(x: torch.Tensor) -> torch.Tensor:
        out = net(x).relu() + 1
        mark_outputs({"out": out})
        return out

    value = loss(model)
    return compares_rows(value, read_graph(value.grad_fn, {ROWS}, 2).reductions, ROWS, outputs_of_models(value))


@pytest.mark.parametrize(
    "loss",
    [
        lambda f: F.cross_entropy(f(X) @ f(Y).T, LABELS),
        lambda f: F.cross_entropy(F.normalize(f(X)) @ F.normalize(f(X)).T, LABELS),
        lambda f: centred(f(X)).pow(2).mean(),
        lambda f: F.mse_loss(centred(f(X)), Y) + centred(f(Y)).abs().mean(),
        lambda f: torch.cdist(f(X), f(Y)).mean(),
        lambda f: (f(X) / f(X).std(0)).abs().sum(),
        lambda f: F.mse_loss(f(X), Y) + F.cross_entropy(f(X) @ f(Y).T, LABELS),
    ],
    ids=["contrast", "itself", "centred", "centred once", "distances", "scaled", "one term of two"],
)
def test_losses_that_compare_rows_are_found(loss: Loss) -> None:
    assert mixes(loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda f: F.cross_entropy(f(X), LABELS),
        lambda f: F.mse_loss(f(X), f(Y)),
        lambda f: (f(X) - Y).pow(2).sum(0).mean(),
        lambda f: F.triplet_margin_loss(f(X), f(Y), f(X + Y)),
        lambda f: 1 - F.cosine_similarity(f(X), f(Y)).mean(),
        lambda f: F.cross_entropy(f(X[:, None].expand(-1, 3, -1)).flatten(0, 1), LABELS.repeat_interleave(3)),
        lambda f: F.binary_cross_entropy(f(X).sigmoid(), Y.sigmoid(), reduction="sum") - 0.5 * f(Y).exp().sum(),
        lambda f: F.ctc_loss(
            f(X[None].expand(5, -1, -1)).log_softmax(-1),
            torch.ones(ROWS, 1, dtype=torch.long),
            torch.full((ROWS,), 5),
            torch.ones(ROWS, dtype=torch.long),
        ),
    ],
    ids=["classes", "mse of two", "sum first", "triplet", "cosine", "tokens", "two sums", "time first"],
)
def test_losses_of_each_row_are_not(loss: Loss) -> None:
    assert not mixes(loss)


def test_rows_that_a_judging_model_mixes_are_its_own_beside_another_way_to_them() -> None:
    """A loss of super resolution: a discriminator with BatchNorm judges what a frozen network looks at as well."""
    judge, frozen = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)), nn.Linear(6, 3)

    def judged(made: torch.Tensor) -> torch.Tensor:
        out = judge(made)
        mark_outputs(out)
        return out

    def loss(f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        made = f(X)
        return F.l1_loss(frozen(made), Y[:, :3]) + F.mse_loss(judged(made), Y[:, :1])

    assert not mixes(loss)
    assert mixes(lambda f: F.mse_loss(judged(made := f(X)), Y[:, :1]) + centred(made).pow(2).mean())


def test_rows_without_a_gradient_that_a_loss_multiplies_by_are_listed() -> None:
    out = nn.Linear(6, 6)(X)
    mark_outputs(out)
    assert fixed_rows(F.cross_entropy(out @ Y.T, LABELS), ROWS) == [pytest.approx(float(Y.sum()), abs=1e-5)]
    assert fixed_rows(F.cross_entropy(out @ torch.ones(6, 3), LABELS.clamp(max=2)), ROWS) == []
