"""Tensors gathered when they are written: files are those of plain tensors, nobody reads what is not there."""

import contextlib
import copy
import ctypes
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safe
import torch
from torch import nn

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.state.late_files import writing_late
from fsdplaunch.runtime.auto.state.late_tensors import LateTensor, LateTensors

VALUE = torch.arange(12.0).view(3, 4)


class Source:
    """Gives late tensors of rank 0 alone, and remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.keep, self.late = True, LateTensors(lambda: False)

    def finish(self, _doing: str) -> Any:
        return contextlib.nullcontext()

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        return self.late.tensor(value.shape, value.dtype, lambda: self.asked.append(value.numel()) or value)


@pytest.mark.parametrize(
    "compute",
    [
        lambda late: late * 2,
        lambda late: torch.stack([late, late]),
        lambda late: late.t().contiguous(),
        lambda late: late.chunk(2, dim=1)[1],
        lambda late: late.to(torch.bfloat16),
        lambda late: nn.Parameter(late) @ late.t(),
        lambda late: late[1],
        torch.clone,
        lambda late: torch.from_numpy(late.numpy()),
        lambda late: torch.tensor(late.tolist()),
        lambda late: torch.zeros(3, 4).copy_(late),
        lambda late: late.detach().mul_(3),
        torch.ops.aten.neg,
        copy.deepcopy,
        copy.copy,
        lambda late: pickle.loads(pickle.dumps(late)),
        lambda late: torch.cat([late.view(-1), late.data.flatten()]),
        lambda late: safe.load(safe.save({"x": late}))["x"],
    ],
)  # fmt: skip
def test_whatever_computes_with_one_has_its_values(compute: Callable[[Any], Any]) -> None:
    source = Source()
    late = source.tensor(VALUE.clone())
    assert source.asked == []
    found, expected = compute(late), compute(VALUE.clone())
    assert not isinstance(found, LateTensor)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert source.asked == [12]  # once, and it stays


def test_its_address_leads_to_its_values() -> None:
    late = Source().tensor(VALUE)
    assert list((ctypes.c_float * 12).from_address(late.data_ptr())) == list(range(12))


def test_looking_at_one_asks_for_nothing() -> None:
    source = Source()
    late = source.tensor(VALUE)
    param = nn.Parameter(late)
    assert isinstance(param, nn.Parameter)
    assert param.requires_grad
    for tensor in (late, param, param.detach(), late.contiguous(), late.cpu(), late.data):
        assert isinstance(tensor, LateTensor)
        assert (tensor.shape, tensor.dtype, tensor.device) == (VALUE.shape, VALUE.dtype, VALUE.device)
        assert tensor.is_floating_point()
        assert torch.is_floating_point(tensor)
        assert (tensor.numel(), tensor.nbytes, tensor.dim(), tensor.is_contiguous()) == (12, 48, 2, True)
        assert tensor.untyped_storage().data_ptr() == late.untyped_storage().data_ptr() != 0
        assert tensor.untyped_storage().nbytes() == 48
    assert not param.detach().requires_grad
    module = nn.Linear(4, 3, bias=False)
    module.weight = param
    assert list(module.state_dict()) == ["weight"]
    assert source.asked == []


def test_files_are_those_of_plain_tensors_and_nothing_stays_in_memory(tmp_path: Path) -> None:
    from transformers import modeling_utils

    weights = {"b": VALUE.bfloat16(), "a": torch.randn(30, 5), "scalar": torch.tensor(3)}
    bound: Any = modeling_utils.safe_save_file  # from when transformers was imported
    bound(weights, tmp_path / "plain", metadata={"format": "pt"})
    source = Source()
    late = {name: source.tensor(value) for name, value in weights.items() if name != "scalar"}
    state = late | {"scalar": weights["scalar"]}
    with writing_late(source, "write"):  # type: ignore[arg-type]
        modeling_utils.safe_save_file(state, tmp_path / "one", metadata={"format": "pt"})
        safe.save_file(state, tmp_path / "two", {"format": "pt"})
        assert source.asked == [150, 12, 150, 12]
        torch.save(state, tmp_path / "pickled")
        assert not any(value.memory.any() for value in late.values())
        safe.save_model(nn.ParameterDict({"a": late["a"]}), str(tmp_path / "model"))
        with pytest.raises(RuntimeError, match="share memory"):
            modeling_utils.safe_save_file({"a": late["a"], "again": late["a"].detach()}, tmp_path / "twice")
        safe.save_file({"a": late["a"], "half": late["b"][:2]}, tmp_path / "views")
    assert modeling_utils.safe_save_file is bound
    for name in ("one", "two"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "plain").read_bytes()
    assert torch.equal(safe.load_file(tmp_path / "model")["a"], weights["a"])
    assert torch.equal(safe.load_file(tmp_path / "views")["half"], weights["b"][:2])
    found = torch.load(tmp_path / "pickled")
    for name, value in weights.items():
        assert torch.equal(found[name], value)
    assert type(found["a"]) is torch.Tensor
    unread = source.tensor(VALUE)
    with pytest.raises(CheckpointError, match="after it has ended"):
        _ = unread + 1
