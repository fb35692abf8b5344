"""What safetensors writes of a sharded model, one tensor after the other, is the file of the model before."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch as safe
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto import saves
from fsdplaunch.runtime.auto.working_tree import WorkingTree, rank_0_having_the_tree
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.state_dict.gather import ShardGatherer


class Net(nn.Module):
    """Two names for one parameter, three dtypes, a scalar, nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 7)
        self.head = nn.Linear(7, 300)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0, 3))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(model.embedding.weight.data, mesh, [Shard(0)]))
    model.embedding.weight = model.head.weight = weight
    model.scale = nn.Parameter(distribute_tensor(model.scale.data, mesh, [Shard(0)]))


@pytest.mark.usefixtures("group")
def test_files_of_a_sharded_model_are_those_of_the_model_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Net()
    names = [name for name in model.state_dict() if name != "head.weight"]
    safe.save_model(model, "model-before")
    safe.save_file({name: model.state_dict()[name] for name in names}, "file-before", metadata={"epoch": "3"})
    held = safe.save({name: model.state_dict()[name] for name in names})
    shard(model)
    gathered_at: list[int] = []
    gather = ShardGatherer.gather

    def noting(self: ShardGatherer, tensor: Any) -> torch.Tensor:
        gathered_at.append(tensor.numel())
        return gather(self, tensor)

    monkeypatch.setattr(ShardGatherer, "gather", noting)
    ownership: Any = SimpleNamespace(ours=True, ranked=False)
    context: Any = SimpleNamespace(ownership=ownership, rank=0, size=1, printed=set(), config=Config())
    with ExitStack() as stack:
        stack.enter_context(rank_0_having_the_tree(WorkingTree(ownership, 0)))
        for name, make in (
            ("save", saves.safe_bytes),
            ("save_file", saves.safe_file),
            ("save_model", saves.safe_model),
        ):
            stack.enter_context(
                replaced(safe, name, lambda original, make=make: functools.partial(make, original, context))
            )
        state = {name: model.state_dict()[name] for name in names}
        safe.save_model(model, "model")
        safe.save_file(state, "file", metadata={"epoch": "3"})
        assert gathered_at == [6, 2100, 6, 2100]
        assert safe.save(state) == held
        with pytest.raises(CheckpointError, match=r"cannot write tied: .*share memory"):
            safe.save_file(model.state_dict(), "tied")
        with pytest.raises(CheckpointError, match=r"cannot write no/file: .*No such file"):
            safe.save_file(state, "no/file")
    for name in ("model", "file"):
        assert Path(name).read_bytes() == Path(f"{name}-before").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "store") == [
        "file",
        "file-before",
        "model",
        "model-before",
    ]
