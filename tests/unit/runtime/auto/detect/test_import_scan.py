"""What a script's source says about who shards, and which GPU a script for one GPU sees."""

import sys
import types
from pathlib import Path

import pytest

from fsdplaunch.runtime.auto.data.visible_gpu import see_own_gpu
from fsdplaunch.runtime.auto.detect import import_scan
from fsdplaunch.runtime.auto.detect.import_scan import find_mention, speaks_of_ranks
from fsdplaunch.runtime.script_line import is_user_file


def mention(folder: Path, text: str) -> str | None:
    file = folder / "train.py"
    file.write_text(text)
    found = find_mention([str(file)])
    return None if found is None else str(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import fsdplaunch\n\nfsdplaunch.prepare(model)", "prepare, train.py:3"),
        ("from fsdplaunch import prepare as p", "prepare, train.py:1"),
        ("import os\nfrom accelerate import Accelerator", "Accelerator, train.py:2"),
        ("import accelerate as a\na.Accelerator()", "Accelerator, train.py:2"),
        ("from transformers import Seq2SeqTrainer", "Seq2SeqTrainer, train.py:1"),
        ("import transformers\ntransformers.Trainer(model)", "Trainer, train.py:2"),
        ("from trl import SFTConfig, SFTTrainer", "SFTTrainer, train.py:1"),
        ("def main():\n    from lightning.pytorch import Trainer", "Trainer, train.py:2"),
        ("import deepspeed", "deepspeed, train.py:1"),
        ("from torch.distributed.fsdp import fully_shard", "fully_shard, train.py:1"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", "DistributedDataParallel, train.py:1"),
        ("import torch\ntorch.nn.parallel.DistributedDataParallel(m)", "DistributedDataParallel, train.py:2"),
        ("from torch import nn\nnn.parallel.DistributedDataParallel(m)", "DistributedDataParallel, train.py:2"),
        (
            "from torch.nn import parallel as p\np.DistributedDataParallel(m)",
            "DistributedDataParallel, train.py:2",
        ),
    ],
)
def test_name_that_shards_is_found_with_its_line(tmp_path: Path, text: str, found: str) -> None:
    assert mention(tmp_path, text) == found


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nfrom torch import nn\nmodel = nn.Linear(1, 1)",
        "class Trainer:\n    pass\n\nTrainer()",
        "from mine import Trainer, Accelerator",
        "import fsdplaunch\nfsdplaunch.save_checkpoint('here', model=model)",
        "from transformers import AutoModelForCausalLM, TrainerCallback",
        "print('from accelerate import Accelerator')  # fsdplaunch.prepare",
        "this is not python",
    ],
)
def test_script_that_shards_nothing_is_not_taken_for_one_that_does(tmp_path: Path, text: str) -> None:
    assert mention(tmp_path, text) is None


def test_only_the_users_own_files_count() -> None:
    assert is_user_file("/home/me/project/train.py")
    assert not is_user_file("/venv/lib/python3.11/site-packages/accelerate/accelerator.py")
    assert not is_user_file("<frozen importlib._bootstrap>")
    assert not is_user_file(pytest.__file__.replace("site-packages", "dist-packages"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"LOCAL_RANK": "3"}, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}),
        (
            {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"},
            {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "6"},
        ),
        (
            {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-1a"},
            {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-1a"},
        ),
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0"}, {"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0"}),
    ],
)
def test_script_for_one_gpu_sees_its_own_as_number_0(
    tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("model.to('cuda:0')")
    see_own_gpu(str(script), before)
    assert before == after


@pytest.mark.parametrize("text", ["import fsdplaunch\nfsdplaunch.prepare()", "os.environ['LOCAL_RANK']"])
def test_script_that_knows_about_ranks_keeps_all_gpus(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    environ = {"LOCAL_RANK": "1"}
    assert not see_own_gpu(str(script), environ)
    assert environ == {"LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nif os.environ.get('RANK', '0') == '0':\n    pass", True),
        ("local_rank = 0", True),
        ("from accelerate import Accelerator\nAccelerator()", True),
        ("ranking = franks = rank_loss = 0", False),
    ],
)
def test_a_script_speaks_of_ranks_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, *, found: bool
) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    monkeypatch.setattr(import_scan, "user_files", lambda _main: [str(file)])
    assert speaks_of_ranks() is found


class Lazy(types.ModuleType):
    """As speechbrain has them: the first look at an attribute imports the module, which may not be installed."""

    def __getattr__(self, name: str) -> object:
        msg = f"lazy import of {name} failed"
        raise ImportError(msg)


def test_lazy_modules_are_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    assert import_scan.user_files(str(tmp_path / "train.py"))[0] == str(tmp_path / "train.py")
