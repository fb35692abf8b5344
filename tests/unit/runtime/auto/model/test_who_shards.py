"""What is a reason to wait with the decision who shards: names that the user's own modules hold, used or not."""

import types

import pytest
from torch.nn.parallel import DistributedDataParallel

from fsdplaunch.runtime.auto.model import who_shards
from fsdplaunch.runtime.messages import is_user_file


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import fsdplaunch", True),
        ("from fsdplaunch import prepare as p", True),
        ("from accelerate import Accelerator as A", True),
        ("import accelerate as a", True),
        ("from transformers import Seq2SeqTrainer", True),
        ("from transformers import Trainer\nclass Mine(Trainer):\n    pass\ndel Trainer", True),
        ("from torch.distributed.fsdp import fully_shard", True),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", True),
        ("from torch.nn import parallel as p", True),
        ("from torch.distributed import tensor", True),
        ("import torch\nfrom torch import nn\nmodel = nn.Linear(1, 1)", False),
        ("class Trainer:\n    pass\ntrainer = Trainer()", False),
        ("from fsdplaunch import save_checkpoint", False),
        ("from transformers import AutoModelForCausalLM, TrainerCallback", False),
        ("import transformers", False),
        ("def later():\n    from accelerate import Accelerator", False),
    ],
)
def test_a_name_that_shards_is_found_among_the_loaded_ones(
    monkeypatch: pytest.MonkeyPatch, text: str, *, found: bool
) -> None:
    module = types.ModuleType("train")
    exec(text, vars(module))
    monkeypatch.setattr(who_shards, "sys", types.SimpleNamespace(modules={"__main__": module}))
    assert who_shards.holds_a_sharder() is found


def test_only_the_users_own_files_count() -> None:
    assert is_user_file("/home/me/project/train.py")
    assert not is_user_file("/venv/lib/python3.11/site-packages/accelerate/accelerator.py")
    assert not is_user_file("<frozen importlib._bootstrap>")
    assert not is_user_file(pytest.__file__.replace("site-packages", "dist-packages"))


class Lazy(types.ModuleType):
    """As speechbrain has them: the first look at an attribute imports the module, which may not be installed."""

    def __getattr__(self, name: str) -> object:
        msg = f"lazy import of {name} failed"
        raise ImportError(msg)


def test_lazy_modules_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, own = Lazy("lazy"), types.ModuleType("own")
    vars(own).update(__file__="/home/me/project/train.py", lazy=lazy)
    monkeypatch.setattr(who_shards, "sys", types.SimpleNamespace(modules={"lazy": lazy, "own": own}))
    assert not who_shards.holds_a_sharder()
    own.DDP = DistributedDataParallel
    assert who_shards.holds_a_sharder()
