"""Who shards is decided once and printed; what cannot be done is an error that names the script's line."""

import textwrap
from pathlib import Path

import pytest

from tests.scripts.conftest import Forks, Run

RANKS = 2
HEAD = """
    import torch, torch.nn.utils.prune
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x):
            return self.layers(x)
"""


def run(forks: Forks, folder: Path, body: str, *, ranks: int = RANKS, **keys: object) -> Run:
    return forks.run(textwrap.dedent(HEAD) + textwrap.dedent(body), folder / "run", ranks=ranks, **keys)


TRAIN = """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


PART_FIRST = """
    model = Net()
    model.layers[0].to("cpu")
    model.layers.to("cpu")
    model.to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print({type(param).__name__ for param in model.parameters()})
"""

BATCHES = """
    model = Net().to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(12), batch_size=2, shuffle=True)
    print(len(loader), [x for batch in loader for x in batch.tolist()], torch.randint(10**9, (1,)).item())
    print(len(loader), [x for batch in loader for x in batch.tolist()])
    model.eval()
    print(len(loader), sorted(x for batch in loader for x in batch.tolist()) == list(range(12)))
"""

SAMPLERS = """
    from torch.utils.data import Sampler, SubsetRandomSampler
    class Buckets(Sampler):
        def __init__(self, n):
            self.n = n
        def __iter__(self):
            order = torch.randperm(self.n).tolist()
            return iter([order[i : i + 4] for i in range(0, self.n, 4)])
        def __len__(self):
            return self.n // 4
    model = Net().to("cpu")
    subset = DataLoader(torch.arange(16), batch_size=4, sampler=SubsetRandomSampler(range(8)))
    buckets = DataLoader(torch.arange(16), batch_sampler=Buckets(16))
    single = DataLoader(torch.arange(16), batch_size=None)
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.randperm(16))
        def __len__(self):
            return 16
    stream = DataLoader(Stream(), batch_size=4)
    for loader in (subset, buckets, single, stream):
        print(len(loader), [x for batch in loader for x in batch.reshape(-1).tolist()])
"""

UNSEEDED = """
    import os
    torch.manual_seed(int.from_bytes(os.urandom(7), "big"))  # torch.seed() is the same on all ranks
    model = Net()
    print(model.layers[0].weight.sum().item())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print(model.layers[0].weight.sum().item())
"""

OF_NO_MODULE = """
    import torch.distributed as dist
    model = Net()
    temperature = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.Adam([*model.parameters(), temperature], lr=0.1)
    for step in range(3):
        ((model(torch.randn(2, 4)) - temperature) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{temperature.item():.7f}")
"""


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Scripts that end well, by their text: all in one launch."""
    bodies = (TRAIN, PART_FIRST, SAMPLERS, UNSEEDED, OF_NO_MODULE)
    texts = {body: textwrap.dedent(HEAD) + textwrap.dedent(body) for body in bodies}
    found = forks.beside(tmp_path_factory.mktemp("trained"), texts)
    assert not [err for run in found.values() for err in run.err if "Traceback" in err]
    return found


def test_script_that_shards_nothing_is_sharded_and_named(trained: dict[str, Run]) -> None:
    done = trained[TRAIN]
    assert done.err[0].count(", for the script, train.py:") == 1
    assert "sharded Net: 2 x Linear, 40 parameters, FSDP2 FULL_SHARD over 2 ranks" in done.err[0]
    assert done.err[1] == ""


@pytest.mark.parametrize(("form", "notes"), [("SHARDED_STATE_DICT", 1), ("FULL_STATE_DICT", 0)])
def test_full_save_names_the_call_for_shards_where_they_are_configured(
    forks: Forks, tmp_path: Path, form: str, notes: int
) -> None:
    save = 'torch.save(model.state_dict(), "model.pt")\n    ' * 2
    done = run(forks, tmp_path, TRAIN + f"    {save}", fsdp_config__fsdp_state_dict_type=form)
    assert done.codes == [0, 0], done.err
    assert done.err[0].count("fsdplaunch.save_checkpoint writes every rank's shards") == notes
    assert done.err[1] == ""


def test_submodule_moved_first_leaves_the_model_to_be_sharded(trained: dict[str, Run]) -> None:
    done = trained[PART_FIRST]
    assert done.out == ["{'DTensor'}\n"] * 2


def test_script_that_prepares_keeps_doing_so(forks: Forks, tmp_path: Path) -> None:
    body = """
        import fsdplaunch
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        print(type(model).__name__)
        fsdplaunch.prepare(model, optimizer)
    """
    done = run(forks, tmp_path, body)
    assert done.codes == [0, 0], done.err
    assert "sharded Net: " in done.err[0]
    assert "for the script" not in done.err[0]
    assert done.out == ["Net\n", "Net\n"]


REFUSED = {
    "shared": (
        """
        model, other = Net(), Net()
        other.layers[1].weight = model.layers[0].weight
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        """,
        "train.py:17: layers.1.weight of Net also belongs to Net, which was sharded at train.py:17",
    ),
    "after a backward": (
        """
        model = Net()
        model(torch.ones(2, 4)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        "train.py:17 builds SGD after a backward pass: Net has gradients, of each rank's own rows",
    ),
    "of no module, after a backward": (
        """
        scale = nn.Parameter(torch.ones(4))
        (scale * torch.ones(2, 4)).sum().backward()
        optimizer = torch.optim.SGD([scale], lr=0.1)
        """,
        "train.py:17 builds SGD after a backward pass: a parameter of no module has gradients",
    ),
    "part of a model": (
        """
        part = Net().to("cpu")
        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = part
                self.own = nn.Linear(4, 4)
            def forward(self, x):
                return self.own(self.part(x))
        whole = Whole()
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        """,
        "train.py:24: Net was sharded at train.py:15, before it was part of a model",
    ),
    "memory": (
        """
        Net().to("cpu").share_memory()
        """,
        "train.py:15: share_memory_(): no memory holds all of a sharded tensor",
    ),
    # The models of these are looked at again whenever an optimizer is built.
    "added by a library": (
        """
        text = "class Policy(Net):\\n def __init__(self):\\n  super().__init__()\\n  {}\\n  {}\\n  {}".format(
            "self.first = torch.optim.SGD(self.parameters(), lr=0.1)",
            "self.late = nn.Linear(4, 4)",
            "self.second = torch.optim.SGD(self.late.parameters(), lr=0.1)",
        )
        exec(compile(text, "<library>", "exec"))
        policy = Policy()
        """,
        "train.py:21: late.weight of Policy appeared after the model was sharded at train.py:21",
    ),
    "added, then called": (
        """
        model = Net().to("cpu")
        model.head = nn.Linear(4, 2)
        model(torch.ones(2, 4))
        """,
        "train.py:17: head.weight of Net appeared after the model was sharded at train.py:15",
    ),
}


@pytest.fixture(scope="module")
def refused(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    texts = {name: textwrap.dedent(HEAD) + textwrap.dedent(body) for name, (body, _) in REFUSED.items()}
    return forks.beside(tmp_path_factory.mktemp("refused"), texts)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_names_the_line(refused: dict[str, Run], name: str) -> None:
    for err in refused[name].err:
        assert REFUSED[name][1] in err
        assert "fsdplaunch.prepare" in err or "batch size" in err


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"fsdp_config__fsdp_version": 1},
            "train.py:16 builds SGD, nothing in the script shards it, and doing so needs fsdp_version 2",
        ),
        (
            {"fsdp_config__fsdp_transformer_layer_cls_to_wrap": ("Blok",)},
            "train.py:16 builds SGD, and Net cannot be sharded there: no module of class Blok in Net",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_names_the_line(
    forks: Forks, tmp_path: Path, keys: dict[str, object], says: str
) -> None:
    done = run(forks, tmp_path, TRAIN, **keys)
    assert done.codes == [1, 1], done.err
    assert all(says in err and "fsdplaunch.prepare" in err for err in done.err), done.err[0]


def test_nobody_shards_when_that_is_asked_for(forks: Forks, tmp_path: Path) -> None:
    done = run(forks, tmp_path, TRAIN, launch__shard="off")
    assert done.codes == [0, 0], done.err
    assert done.parameters == [[], []]


def test_ranks_draw_their_own_batches_from_one_order(forks: Forks, tmp_path: Path) -> None:
    done = run(forks, tmp_path, BATCHES)
    assert "batches of 2 on each of 2 ranks, 4 together" in done.err[0]
    orders = []
    for epoch in (0, 1):
        lines = [out.splitlines()[epoch] for out in done.out]
        assert all(line.startswith("3 [") for line in lines)
        shares = [line[3 : line.index("]")].split(", ") for line in lines]
        assert sorted(int(x) for share in shares for x in share) == list(range(12))
        orders.append(shares)
    assert orders[0] != orders[1]
    draws = {out.splitlines()[0].rsplit(" ", 1)[1] for out in done.out}
    assert len(draws) == 2
    assert [out.splitlines()[2] for out in done.out] == ["6 True", "6 True"]


def test_samplers_of_the_script_are_divided_without_a_gap_or_a_double(trained: dict[str, Run]) -> None:
    done = trained[SAMPLERS]
    for index, (length, items) in enumerate([(1, 8), (2, 16), (8, 16), (2, 16)]):
        lines = [out.splitlines()[index] for out in done.out]
        assert all(line.startswith(f"{length} [") for line in lines)
        shares = [line[line.index("[") + 1 : -1].split(", ") for line in lines]
        assert sorted(int(x) for share in shares for x in share) == list(range(items))
    assert "Buckets: rank 0 draws its batches, ranks take turns" in done.err[0]


def test_model_built_without_a_seed_is_rank_0s_everywhere(trained: dict[str, Run]) -> None:
    done = trained[UNSEEDED]
    (before, after), (other, same) = (out.splitlines() for out in done.out)
    assert before != other
    assert after == same
    assert float(after) == pytest.approx(float(before), abs=1e-5)


def test_parameters_of_no_module_stay_equal(trained: dict[str, Run]) -> None:
    done = trained[OF_NO_MODULE]
    assert done.out[0] == done.out[1] != "0.0000000\n"
    assert "1 parameters of no module stay unsharded" in done.err[0]


IN_LIBRARY = """
import sys
import torch
from torch import nn
sys.path.insert(0, sys.argv[1])
import library
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
if sys.argv[2] == "moved":
    model.to("cpu")
library.step(model, torch.ones(2, 4))
"""

LIBRARY = """
import torch
def step(model, x):
    met = []
    model[1].register_forward_pre_hook(lambda module, _: met.append(module.weight))
    model(x).sum().backward()
    return torch.optim.SGD(met, lr=0.1)
"""


@pytest.mark.parametrize(
    ("mode", "message"),
    [("plain", "builds SGD after a backward pass"), ("moved", "builds SGD from parameters that were gathered")],
)
def test_an_optimizer_that_a_library_builds_in_its_step_is_refused_at_the_scripts_line(
    forks: Forks, tmp_path: Path, mode: str, message: str
) -> None:
    script, packages = tmp_path / "train.py", tmp_path / "site-packages"
    packages.mkdir()
    (packages / "library.py").write_text(LIBRARY)
    script.write_text(IN_LIBRARY)
    done = forks.run(script, tmp_path / "run", str(packages), mode, ranks=2)
    assert done.codes == [1, 1]
    assert f"train.py:10 {message}" in done.err[0]
