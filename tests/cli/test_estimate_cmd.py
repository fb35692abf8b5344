"""`fsdplaunch estimate` as a user calls it: the quick path, without torch."""

import json
import subprocess
import sys

import pytest

from tests.unit.estimate.conftest import LLAMA, write_shard

CONFIG = dict(LLAMA)


@pytest.fixture
def folder(tmp_path):
    """A model folder of 100 shards, 40 tensors in each."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    where = {}
    for number in range(100):
        file = f"model-{number + 1:05}-of-00100.safetensors"
        part = {f"model.layers.{number}.part{index}.weight": (512, 512) for index in range(40)}
        write_shard(path / file, part)
        where |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def test_json_parts_sum_up_and_the_first_row_is_yours(cli, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ("--world-size", "16", "--gpu-memory", "80GB", "--json", "--set", "mixed_precision=bf16")
    done = cli("estimate", "config.json", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "fits"
    assert [row["yours"] for row in found["strategies"]][:2] == [True, False]
    for row in found["strategies"]:
        assert sum(row["parts"].values()) + row["context"] == row["gpu"]
    assert found["setup"]["world"] == 16
    assert found["gpu_memory"] == 80 * 10**9
    assert found["fewest_ranks"] >= 1
    assert found["largest_batch"] > 1


def test_an_estimate_for_pytorch_xla_says_what_it_is_of(cli):
    done = cli("estimate", "8b", "--json", "--world-size", "4", "--set", "fsdp_config.xla=true")
    assert "this is for torch's FSDP on GPUs; PyTorch/XLA's memory on TPUs differs" in done.stdout


def test_folder_of_100_shards_is_read_without_torch(tmp_path, folder):
    code = (
        "import sys\nfrom fsdplaunch.cli.app import run\n"
        f"assert run(['estimate', {str(folder)!r}, '--world-size', '64', '--gpu-memory', '80GB']) == 0\n"
        "assert not {'torch', 'rich', 'safetensors', 'numpy'} & set(sys.modules), sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1.049 B parameters, 100 blocks (headers of 100 files in" in done.stdout
