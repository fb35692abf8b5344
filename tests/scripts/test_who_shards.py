"""Who shards is decided by what a script does, not by a word in it, and known at the first optimizer step."""

import re
from pathlib import Path

import pytest

from tests.scripts.conftest import PROGRAMS, Forks, Run
from tests.scripts.test_programs import assert_same_files, assert_sharded

HEAD = """
import os, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
def step(model, optimizer):
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    print("stepped")
"""

UNUSED = """
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
if os.environ.get("NEVER"):
    from transformers import Trainer
    model = nn.parallel.DistributedDataParallel(model)
model.to("cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
step(model, optimizer)
assert all(type(p).__name__ == "DTensor" for group in optimizer.param_groups for p in group["params"])
"""

EARLY = """
from torch.nn.parallel import DistributedDataParallel
model.to("cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
total = len(loader)
for number, batch in enumerate(loader, 1):
    step(model, optimizer)
print(number, "of", total)
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator()
model.to("cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(2):
    step(model, optimizer)
"""

BY_HAND = """
from torch.distributed.fsdp import fully_shard
model.to("cpu")
for part in model:
    fully_shard(part)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    step(model, optimizer)
"""

BY_COLLECTIVES = """
torch.distributed.init_process_group("gloo")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).pow(2).mean().backward()
for p in model.parameters():
    torch.distributed.all_reduce(p.grad.data)
"""

BY_FUNCTIONAL_COLLECTIVES = """
torch.distributed.init_process_group("gloo")
import torch.distributed._functional_collectives as functional
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).pow(2).mean().backward()
for p in model.parameters():
    functional.all_reduce(p.grad, "sum", torch.distributed.group.WORLD)
"""

TENSOR_PARALLEL = """
import torch.distributed as dist
dist.init_process_group("gloo")
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, gradient):
        return gradient
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8 // dist.get_world_size()), nn.Linear(8 // dist.get_world_size(), 4)
    def forward(self, x):
        return Reduce.apply(self.down(self.up(x)))
model = Layer().to("cpu")
step(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""

OVER_A_NODE = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
"""

GATHERED = """
from torch.distributed.fsdp import fully_shard
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
with torch.no_grad():
    model(torch.ones(2, 4))  # leaves what is in the root gathered
optimizer.step()  # computes nothing yet, as Lightning's, which is given a closure
step(model, optimizer)
"""

UNPREPARED = """
from accelerate import Accelerator
accelerator = Accelerator()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
step(model, optimizer)
"""

REPLICATED = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
step(model, optimizer)
"""

LAYERS_DIVIDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to("cpu")
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
for _ in range(2):
    step(model, optimizer)
print(" ".join(f"{p.full_tensor().sum().item():.4f}" for p in model.parameters()))
"""

ALREADY_SHARDED = """
model.to("cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
names = list(model.state_dict())
from torch.distributed import group, utils
utils._sync_module_states(model, group.WORLD, 2**20, src=0, params_and_buffers_to_ignore=[])  # as Lightning
ddp = nn.parallel.DistributedDataParallel(model)
assert list(ddp.state_dict()) == ["module." + name for name in names]
assert not isinstance(ddp, torch.distributed.fsdp.FSDPModule) and ddp.module is model
compiled = torch.compile(ddp, backend="eager", fullgraph=True)
step(compiled, optimizer)
model.compile(backend="eager", fullgraph=True)
step(ddp, optimizer)
ddp.load_state_dict({name: torch.zeros(value.shape) for name, value in ddp.state_dict().items()})
print(sum(p.abs().sum().item() for p in model.parameters()), ddp.eval().training, model.training)
"""

BUFFERS = """
from accelerate import Accelerator
accelerator = Accelerator()
class Net(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.place = nn.Parameter(torch.ones(4))
    def forward(self, x):
        return super().forward(x + self.place)
model = Net(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
model[1].running_mean.fill_(1.0 if accelerator.is_main_process else 5.0)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
assert model[1].running_mean.tolist() == [1.0] * 4
step(model, optimizer)
print(" ".join(name for name in model.state_dict() if name.startswith(("1.", "place"))))
assert not hasattr(model, "get_parameter_or_buffer")
"""


def run(forks: Forks, folder: Path, body: str, **keys: object) -> Run:
    return forks.run(HEAD + body, folder / "run", ranks=2, **keys)


def test_unused_imports_and_dead_branches_count_for_nothing(forks: Forks, tmp_path: Path) -> None:
    done = forks.passes(HEAD + UNUSED, tmp_path / "run", ranks=2)
    assert re.search(r"sharded Sequential: .*, for the script, train\.py:\d+\n", done.err[0])
    assert_sharded(done)


@pytest.mark.parametrize(
    ("body", "owner"),
    [(ACCELERATE, "Accelerator"), (BY_HAND, "fully_shard"), (GATHERED, "fully_shard")],
    ids=["accelerate", "by hand", "by hand, evaluated before"],
)
def test_what_others_shard_is_left_to_them_and_described_once(
    forks: Forks, tmp_path: Path, body: str, owner: str
) -> None:
    done = forks.passes(HEAD + body, tmp_path / "run", ranks=2)
    assert "for the script" not in done.err[0]
    assert done.err[0].count("sharded Sequential") == 1
    assert re.search(rf"FSDP2 FULL_SHARD over 2 ranks.*, by {owner}\n", done.err[0])
    assert done.parameters == [[], []]


def test_layers_that_a_script_divides_over_ranks_are_left_to_it(forks: Forks, tmp_path: Path) -> None:
    done = forks.passes(HEAD + LAYERS_DIVIDED, tmp_path / "run", ranks=2)
    assert "for the script" not in done.err[0]
    plain = LAYERS_DIVIDED.replace("full_tensor().", "").splitlines()
    (tmp_path / "plain.py").write_text(HEAD + "\n".join(line for line in plain if "mesh" not in line))
    assert done.out == forks.run(tmp_path / "plain.py", tmp_path / "plain").out * 2


def test_fsdp1s_hybrid_shard_over_the_devices_of_a_node_is_refused_on_a_cpu(forks: Forks, tmp_path: Path) -> None:
    done = run(forks, tmp_path, OVER_A_NODE)
    assert done.codes == [1, 1]
    assert "HYBRID_SHARD divides a model over a node's devices, and a node has one CPU" in done.err[0]


def test_length_asked_before_it_is_known_who_shards_is_named(forks: Forks, tmp_path: Path) -> None:
    early = forks.passes(HEAD + EARLY, tmp_path / "early", ranks=2)
    said = f"train.py:{(HEAD + EARLY).splitlines().index('total = len(loader)') + 1}: len() of the loader was 8"
    assert early.err[0].count(said) == 1
    assert "each rank reads 4 batches" in early.err[0]
    known = forks.passes(HEAD + EARLY, tmp_path / "known", ranks=2, launch__shard="always")
    assert "len() of the loader" not in known.err[0]


def test_model_is_sharded_for_the_script_always_if_that_is_set(forks: Forks, tmp_path: Path) -> None:
    done = forks.passes(HEAD + UNPREPARED, tmp_path / "run", ranks=2, launch__shard="always")
    assert_sharded(done)


@pytest.mark.parametrize(
    ("body", "setting", "says", "remedy"),
    [
        (UNPREPARED, "auto", "2 workers trained independent replicas", "accelerator.prepare"),
        (
            REPLICATED,
            "explicit",
            "2 workers each held a full replica (DistributedDataParallel)",
            "launch.shard to auto",
        ),
    ],
    ids=["not prepared", "replicated"],
)
def test_unsharded_run_ends_at_its_first_step_with_its_line_and_a_remedy(
    forks: Forks, tmp_path: Path, body: str, setting: str, says: str, remedy: str
) -> None:
    done = run(forks, tmp_path, body, launch__shard=setting)
    assert done.codes == [1, 1], done.err
    assert done.out == ["", ""]
    for err in done.err:
        assert f"train.py ended without sharding a model: {says}" in err
        assert "found at its first optimizer step, train.py:9" in err
        assert remedy in err


BY_ITSELF = """
for _ in range(3):
    model(torch.ones(2, 4)).pow(2).mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
    print("stepped")
"""


def test_script_without_an_optimizer_ends_at_its_second_backward_or_is_sharded_where_it_moves(
    forks: Forks, tmp_path: Path
) -> None:
    done = run(forks, tmp_path, BY_ITSELF)
    assert done.codes == [1, 1], done.err
    assert done.out == ["stepped\n"] * 2
    line = HEAD.count("\n") + 3
    assert f"found at its second backward pass, train.py:{line}" in done.err[0]
    assert "model.to(device)" in done.err[0]
    moved = forks.passes(HEAD + "model.to('cpu')" + BY_ITSELF, tmp_path / "run", ranks=2)
    assert_sharded(moved)


@pytest.mark.parametrize(
    "body",
    [BY_COLLECTIVES, TENSOR_PARALLEL],
    ids=["gradients", "tensor parallel"],
)
def test_script_that_joins_a_group_and_gives_no_model_to_ddp_is_refused_at_its_first_step(
    forks: Forks, tmp_path: Path, body: str
) -> None:
    done = run(forks, tmp_path, body)
    assert 0 not in done.codes
    stepped = "2 workers trained independent replicas; found at its first optimizer step, train.py:9"
    for err in done.err:
        assert (stepped if "step(" in body else "and no torch optimizer made a step") in err
        assert "joined a process group and gives no model to DistributedDataParallel" in err
        assert "--shard off, which leaves all to the script" in err


@pytest.mark.parametrize("body", [BY_COLLECTIVES, BY_FUNCTIONAL_COLLECTIVES], ids=["in place", "functional"])
def test_script_that_averages_gradients_of_shards_is_refused_at_that_line(
    forks: Forks, tmp_path: Path, body: str
) -> None:
    done = run(forks, tmp_path, body, launch__shard="always")
    assert done.codes == [1, 1]
    line = (HEAD + body).count("\n")
    assert f"train.py:{line} exchanges parameters or gradients of a sharded model" in done.err[0]
    assert "--shard off" in done.err[0]


LATE_ACCELERATOR = """
import accelerate.accelerator as late
del late  # so that nothing in the script's names speaks of it
model.to("cpu")
import accelerate.accelerator as late
late.Accelerator()
"""


def test_a_library_that_shards_after_a_model_was_sharded_for_the_script_is_refused(
    forks: Forks, tmp_path: Path
) -> None:
    done = run(forks, tmp_path, LATE_ACCELERATOR)
    assert done.codes == [1, 1]
    line = (HEAD + LATE_ACCELERATOR).count("\n")
    said = f"train.py:{line} builds Accelerator after a model was sharded for the script, train.py:{line - 2}"
    assert said in done.err[0]
    assert "--shard explicit, which leaves all to Accelerator" in done.err[0]


def test_ddp_around_a_sharded_model_is_a_wrapper_like_torchs(forks: Forks, tmp_path: Path) -> None:
    done = forks.passes(HEAD + ALREADY_SHARDED, tmp_path / "run", ranks=2)
    assert re.findall(r"train.py:(\d+): Sequential is compiled without fullgraph", done.err[0]) == ["22"]
    assert done.out == ["stepped\nstepped\n0.0 False False\n"] * 2
    assert_sharded(done)


def test_script_with_hidden_ranks_takes_its_way_for_one_process(forks: Forks, tmp_path: Path) -> None:
    script = PROGRAMS / "ddp" / "nano_gpt.py"
    plain = forks.run(script, tmp_path / "plain")
    done = forks.passes(
        script, tmp_path / "many", ranks=2, launch__hide_ranks=True, launch__keep_global_batch=True
    )
    assert done.losses() == pytest.approx(plain.losses(), abs=1e-4)
    assert_sharded(done)
    assert_same_files(plain.folder, done.folder)


def test_accelerate_shards_models_that_have_buffers_and_parameters_of_their_own(
    forks: Forks, tmp_path: Path
) -> None:
    done = forks.passes(HEAD + BUFFERS, tmp_path / "run", ranks=2)
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert done.out == ["stepped\nplace " + " ".join(f"1.{name}" for name in names) + "\n"] * 2
