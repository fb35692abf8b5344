"""A Trainer's loss that is multiplied by the ranks is told where the model does not divide it, and only there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.compat.hugging_face import compute_loss
from fsdplaunch.runtime.patch import wrap


def _trainer(model: Any, *, ranks: int = 2, average: bool = True) -> Any:
    class Trainer:
        def __init__(self) -> None:
            self.model = model
            self.model_accepts_loss_kwargs = True
            self.args = SimpleNamespace(average_tokens_across_devices=average)
            self.accelerator = SimpleNamespace(num_processes=ranks, unwrap_model=lambda wrapped: wrapped)

        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return model(inputs, num_items_in_batch=num_items_in_batch)

    wrap(Trainer, "compute_loss", compute_loss)
    return Trainer()


class Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        count = kwargs["num_items_in_batch"]
        if torch.is_floating_point(count) and count.dtype is torch.float32:  # what FSDP looks at before a pass
            count = count.to(torch.bfloat16)
        return torch.mean(x)


class Divided(torch.nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        count = kwargs["num_items_in_batch"].to(x.device).to(torch.bfloat16)
        return torch.div(x.sum(), count)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(messages, "unequal", [])
    return messages.unequal


@pytest.mark.parametrize(
    ("model", "settings", "count"),
    [
        (Mean(), {}, 1),
        (Divided(), {}, 0),
        (Mean(), {"ranks": 1}, 0),
        (Mean(), {"average": False}, 0),
    ],
)
def test_a_multiplied_loss_is_told_once(
    told: list[str], model: torch.nn.Module, settings: dict[str, Any], count: int
) -> None:
    trainer = _trainer(model, **settings)
    for _ in range(2):
        assert trainer.compute_loss(model, torch.ones(4), num_items_in_batch=torch.tensor(4.0)).item() == 1
    assert len(told) == count
    assert all("which Mean does not: gradients are 2 times those of one process" in line for line in told)


def test_a_loss_without_a_number_of_labels_is_left_alone(told: list[str]) -> None:
    model = torch.nn.Identity()
    model.forward = lambda x, **_: x.mean()  # type: ignore[method-assign]
    assert _trainer(model).compute_loss(model, torch.ones(2)).item() == 1
    assert told == []
