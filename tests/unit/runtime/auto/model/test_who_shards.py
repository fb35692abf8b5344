"""What is a reason to wait with the decision who shards: names that the user's own modules hold, used or not."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import build_config
from fsdplaunch.runtime.auto.model import who_shards
from fsdplaunch.runtime.messages import is_user_file
from fsdplaunch.runtime.sharding_watch import Library


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
    monkeypatch.setattr(who_shards, "_user_modules", lambda: [module])
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


def test_lazy_modules_are_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    own = types.ModuleType("own")
    vars(own).update(__file__=str(tmp_path / "train.py"), lazy=sys.modules["lazy"])
    monkeypatch.setitem(sys.modules, "own", own)
    assert own in list(who_shards._user_modules())
    who_shards.holds_a_sharder()


def test_a_library_that_replicates_has_its_model_sharded_unless_it_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded: list[str] = []
    library = Library(name="Trainer", remedy="", replicates=True)
    monkeypatch.setattr(who_shards, "on_sharding", lambda _: None)
    monkeypatch.setattr(who_shards, "built_library", lambda: library)
    monkeypatch.setattr(who_shards, "sharded_by", lambda: next(iter(sharded), None))
    config = resolve(build_config({("fsdp_config", "fsdp_version"): 2}))
    replicating = who_shards.Ownership(config)
    assert not replicating.claim("builds AdamW")
    assert replicating.claim_replicas("gives it to DistributedDataParallel")
    assert replicating.ranked
    sharded.append("FullyShardedDataParallel")
    assert not who_shards.Ownership(config).claim_replicas("gives it to DistributedDataParallel")


def test_a_script_that_joins_a_group_has_only_replicas_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(who_shards, "on_sharding", lambda _: None)
    monkeypatch.setattr(who_shards, "joined_by_script", lambda: True)
    config: Any = resolve(build_config({("fsdp_config", "fsdp_version"): 2}))
    joined = who_shards.Ownership(config)
    assert joined.only_replicas
    assert not joined.claim("builds AdamW", now=True)
    assert joined.ours is None
    assert joined.claim_replicas("gives it to DistributedDataParallel")
