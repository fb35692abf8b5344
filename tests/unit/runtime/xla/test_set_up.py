"""What a worker of PyTorch/XLA refuses before training; with torch_xla itself: scripts/campaigns/xla."""

import inspect
import sys
from contextlib import ExitStack
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fsdplaunch.config.load import stack
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.errors import ShardingError, UsageError
from fsdplaunch.runtime import sharding_watch
from fsdplaunch.runtime.auto.torch_calls import step_shards
from fsdplaunch.runtime.inspection.describe import describe
from fsdplaunch.runtime.loading.load import load_weights
from fsdplaunch.runtime.script import ScriptTarget, run_target
from fsdplaunch.runtime.state_dict.named_states import full_optim_state_dict
from fsdplaunch.runtime.xla import set_up, wrappers
from fsdplaunch.runtime.xla.set_up import call_untrained, spawn_here


@pytest.fixture
def runtime(monkeypatch):
    """Stand in for the module that needs torch_xla: what its runtime says."""

    def says(**facts):
        module = SimpleNamespace(**{name: lambda value=value: value for name, value in facts.items()})
        monkeypatch.setitem(sys.modules, "fsdplaunch.runtime.xla.devices", module)
        return module

    return says


@pytest.mark.parametrize(
    ("processes", "devices", "one_each", "said"),
    [
        (4, 4, True, None),
        (4, 8, False, None),
        (1, 1, True, "4 processes were started, and PyTorch/XLA knows 1: each would train alone"),
        (4, 8, True, "4 processes were started for 8 devices, and each drives one only"),
        (4, 1, True, "4 processes were started for 1 devices, and each drives one only"),
    ],
)
def test_processes_that_would_train_alone_are_refused(monkeypatch, processes, devices, one_each, said):
    monkeypatch.setenv("WORLD_SIZE", "4")
    runtime = SimpleNamespace(process_count=lambda: processes, world_size=lambda: devices)
    if said is None:
        set_up._check_one_run(runtime, one_each=one_each)
        return
    with pytest.raises(ShardingError, match=said):
        set_up._check_one_run(runtime, one_each=one_each)


@pytest.mark.parametrize(("shard", "checked"), [("auto", ["train.py"]), ("off", [])])
def test_a_script_that_shards_nothing_ends_at_its_first_step(runtime, monkeypatch, shard, checked):
    runtime(keep_dtypes=None)
    found = []
    monkeypatch.setattr(set_up, "check_at_first_step", found.append)
    monkeypatch.setattr("fsdplaunch.runtime.xla.wrappers.watch_wrappers", lambda: None)
    monkeypatch.setattr("fsdplaunch.runtime.xla.wrappers.configure_trainer", lambda _: None)
    text = f"launch: {{shard: {shard}}}\nfsdp_config: {{xla: true, xla_v2: true}}\n"
    set_up._watch(stack(read_text(text, "x")).config, "train.py")
    assert found == checked


@pytest.mark.parametrize("function", [describe, load_weights, full_optim_state_dict])
def test_models_of_pytorch_xla_are_refused_where_shards_would_be_taken_for_parameters(monkeypatch, function):
    monkeypatch.setattr(nn.Sequential, "__module__", "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel")
    arguments = {describe: (), full_optim_state_dict: (None,)}.get(function, ("folder",))
    with pytest.raises(
        ShardingError, match="does not know models that PyTorch/XLA shards, such as this Sequential"
    ):
        function(nn.Sequential(nn.Linear(2, 2)), *arguments)


def test_whoever_builds_the_class_of_spmd_keeps_shared_parameters_and_splits_outputs_of_any_kind(
    runtime, monkeypatch
):
    class Wrapper(nn.Module):
        """As SPMD's: it moves what it is given."""

        def __init__(self, module, mesh=None, shard_output=None):
            super().__init__()
            self.inner, self.mesh, self.shard_output = module.to("meta"), mesh, shard_output

    def shard_output():
        """Stand in for the function inside transformers' Trainer."""

    ours = runtime(split_output=None).split_output
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(device=lambda: torch.device("meta")))
    monkeypatch.setattr(wrappers, "wrapper_classes", lambda: (type("Other", (Wrapper,), {}), Wrapper))
    marked = []
    monkeypatch.setattr(wrappers, "mark_sharded", marked.append)
    wrappers.watch_wrappers()
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    wrapped = Wrapper(module=model, mesh=1, shard_output=shard_output)
    assert wrapped.inner[1].weight is wrapped.inner[0].weight
    assert (marked, wrapped.mesh, wrapped.shard_output) == (["Wrapper"], 1, shard_output)
    shard_output.__module__ = "transformers.trainer"
    assert Wrapper(nn.Linear(2, 2), shard_output=shard_output).shard_output is ours


def test_torch_xla_finds_torchs_clipping_and_leaves_ours(tmp_path, monkeypatch):
    (tmp_path / "torch_xla.py").write_text(
        "import inspect\nfrom torch.nn import utils\nfound = inspect.signature(utils.clip_grad_norm_)\n"
        "utils.clip_grad_norm_ = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    torchs = inspect.signature(nn.utils.clip_grad_norm_)
    with ExitStack() as undo:
        step_shards(SimpleNamespace(undo=undo, ownership=SimpleNamespace(ours=[])))
        ours = nn.utils.clip_grad_norm_
        assert import_module("torch_xla").found == torchs
        assert nn.utils.clip_grad_norm_ is ours
    del sys.modules["torch_xla"]  # monkeypatch would put it back


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    def run(text, function="main"):
        monkeypatch.setitem(sys.modules, "__main__", None)
        monkeypatch.setattr("sys.path", [])
        monkeypatch.setattr("sys.argv", [])
        monkeypatch.setattr(set_up, "_stepped", [])
        monkeypatch.setattr(sharding_watch, "_seen", [])
        path = tmp_path / "script.py"
        path.write_text(text)
        run_target(ScriptTarget(name=str(path), is_module=False, arguments=()))
        call_untrained(function)
        return capsys.readouterr()

    return run


MAIN = "def main():\n    print('ran')\n"
STEP = "from fsdplaunch.runtime.xla import set_up\nset_up._stepped.append(True)\n"
SHARD = "from fsdplaunch.runtime import sharding_watch\nsharding_watch._seen.append('by the script')\n"


@pytest.mark.parametrize(
    ("text", "function", "times"),
    [
        (MAIN, "main", 1),
        (MAIN.replace("main", "train"), "train", 1),
        (MAIN + STEP, "main", 0),
        (MAIN + SHARD, "main", 0),
        ("class main:\n    pass\n", "main", 0),
        ("from os.path import join as main\n", "main", 0),
    ],
)
def test_the_function_of_a_script_that_has_trained_nothing_is_called(run, text, function, times):
    printed = run(text, function)
    assert printed.out.count("ran") == times
    assert ("the script has trained nothing" in printed.err) == (times == 1)


def test_one_that_wants_arguments_is_refused(run):
    with pytest.raises(UsageError, match="main cannot be called for it: it needs index"):
        run("def main(index):\n    pass\n")


def test_a_scripts_own_spawn_runs_in_this_process():
    module, seen = SimpleNamespace(spawn=None), []
    spawn_here(module, lambda: 3)
    module.spawn(lambda index, *args: seen.append((index, args)), args=("a",), nprocs=8, start_method="fork")
    assert seen == [(3, ("a",))]
