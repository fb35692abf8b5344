"""Every wrong input: exit code 2, one clear message, no traceback, nothing on stdout, nothing written."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplaunch.cli.app import run
from tests.unit.estimate.conftest import LLAMA

FILES = {
    "t.py": "print('it ran')\n",
    "train.py": "",
    "folder/x.txt": "",
    "machines": "a slots=2\nb\n",
    "empty": "# nobody\n",
    "bad": "a\nb slots=x\n",
    "slots": "a slots=1\nb slots=2\n",
    "broken.yaml": "a: [1,\nb: 2\n",
    "list.yaml": "- a\n- b\n",
    "misspelt.yaml": "fsdp_config:\n  fsdp_sharding_stratgy: 1\n",
    "two.yaml": "num_machines: one\nmixed_precision: bf17\n",
    "config.json": json.dumps(dict(LLAMA)),
    "other.json": '{"model_type": "mamba"}',
    "broken.json": "{",
}
LAUNCH = [
    ("--hosts ''", "--hosts has no value"),
    ("--hosts a,,b", "ssh.hosts: must be names of nodes separated by commas, and 'a,,b' has an empty one"),
    ("--hosts a,a", "a is named twice"),
    ("--hosts 'a;id'", "'a;id' is not a name of a node"),
    ("--hosts=-oProxyCommand=id", "'-oProxyCommand=id' is not a name of a node"),
    ("--hosts '$(id)'", "'$(id)' is not a name of a node"),
    ("--hosts a --hostfile machines", "ssh.hosts and ssh.hostfile both name nodes"),
    ("--hosts a --slurm", "--slurm submits the run to a scheduler, but ssh.hosts names nodes"),
    ("--hostfile machines --kubernetes", "--kubernetes submits the run to a scheduler, but ssh.hostfile names"),
    ("--hosts a,b --num-machines 3", "num_machines is 3, but ssh names 2 nodes"),
    ("--hosts a,b --machine-rank 0", "machine_rank is set (command line)"),
    ("--hosts a,b,c --num-processes 8", "num_processes is 8, which cannot be split evenly"),
    ("--hosts a --nnodes 2:3", "launch.nodes is 2:3, but ssh names 1 node"),
    ("--hostfile none", "ssh.hostfile: none cannot be read: no such file or directory"),
    ("--hostfile empty", "ssh.hostfile: empty names no node"),
    ("--hostfile bad", "bad:2: 'b slots=x' is not NAME or NAME slots=N"),
    ("--hostfile slots --num-processes 4", "num_processes is 4, but the hostfile's slots are 3"),
    ("--hostfile machines --nproc-per-node 4", "workers_per_node is 4 (command line), but a has slots=2"),
    ("--num-machines 2 --main-process-ip ''", "--main-process-ip has no value"),
    ("--num-machines 2 --machine-rank 5", "5 is not below num_machines 2; nodes count from 0"),
    ("--num-machines 2 --main-process-port 99999", "must be a whole number from 0 to 65535, got 99999"),
    ("--num-machines 2 --rdzv-endpoint a:99999", "must be HOST:PORT, got a:99999"),
    ("--nnodes 3:2", "launch.nodes: must be MIN:MAX"),
    ("--num_machines none", "num_machines: must be"),
    ("--fsdp_version 3", "fsdp_config.fsdp_version: must be"),
    ("--fsdp_state_dict_type SOME", "fsdp_config.fsdp_state_dict_type: must be"),
    ("--fsdp 'full_shard autowrap'", "'autowrap' is not one of"),
    ("--fsdp_config folder", "must hold one configuration file, found none"),
    ("--start-method thread", "'thread' is not one of spawn, fork, forkserver"),
    ("--rdzv_conf read_timeout=soon", "read_timeout must be a whole number of seconds"),
    ("--rdzv_conf soon", "launch.rendezvous_options: must be"),
    ("--gpu_ids ''", "--gpu_ids has no value"),
    ("--use_deepspeed", "DeepSpeed needs accelerate launch"),
    ("-c nope.yaml", "nope.yaml"),
    ("-c broken.yaml", "broken.yaml:3"),
    ("-c list.yaml", "mapping"),
    ("-c misspelt.yaml", "did you mean fsdp_sharding_strategy"),
    ("--fsdp_full_shard true", "did you mean --fsdp_sharding_strategy?"),
    ("--set main_training_ip=10.0.0.1", "did you mean main_process_ip?"),
    ("--fsdp_cpu_ram_efficiency_effort true", "did you mean --fsdp_cpu_ram_efficient_loading?"),
    ("-c misspelt.yaml", "misspelt.yaml:2:3"),
    ("-c two.yaml", "2 problems"),
    ("--set nope=1", "nope"),
    ("--num-processes many", "num_processes"),
    ("--nope", "--nope"),
]
TUNE = [
    ("--try nonsense=1", "error: --try: nonsense is not a key"),
    ("--try fsdp_reshard_after_forward=true", "names no value that would change the run"),
    ("--memory much", "error: --memory must be a size such as 5GB"),
    ("--write two.yaml", "error: two.yaml exists"),
    ("--write no/where.yaml", "there is no folder"),
    ("--write folder --overwrite", "error: folder is a folder"),
    ("--set num_machines=2 --set main_process_ip=a", "is for 2 nodes, and"),
    ("--set distributed_type=MULTI_GPU", "distributed_type MULTI_GPU shards nothing"),
    ("--set fsdp_config.xla=true", "torch's FSDP, and this one is PyTorch/XLA's"),
]
OTHERS = [
    ("launch", "no script given\nhint:  fsdplaunch launch train.py"),
    ("launch --main_training_ip 10.0.0.1", "did you mean --main_process_ip?"),
    ("launch nope.py", "script not found: nope.py"),
    ("launch trian.py", "script not found: trian.py\nhint:  did you mean train.py?"),
    ("launch /nowhere/trian.py", "script not found: /nowhere/trian.py\nhint:  did you mean train.py?"),
    ("launch folder", "folder is a folder, not a script"),
    ("launch --zero_stage", "--zero_stage needs a value"),
    ("launch --num_cpu_threads_per_process", "--num_cpu_threads_per_process needs a value"),
    ("nope", "nope"),
    ("merge-weights", "CHECKPOINT"),
    ("merge-weights nope folder", "nope"),
    ("tune", "error: no script given"),
    ("tune nothing.py", "error: script not found: nothing.py"),
    ("estimate", "error: no model was named, and no folder here holds *.safetensors"),
    ("estimate 8", "error: 8 needs a unit, as in 8b or 8m"),
    ("estimate Llama-3.1-8B", "error: Llama-3.1-8B: no such file, and not the size of a model"),
    ("estimate absent.json", "error: absent.json cannot be read: no such file or directory"),
    ("estimate train.py", "error: train.py names no function"),
    ("estimate absent.py:build", "error: script not found: absent.py"),
    ("estimate other.json", "error: other.json: the model type 'mamba' is not known"),
    ("estimate broken.json", "error: broken.json is not JSON: "),
    ("estimate config.json --gpu-memory lots", "error: --gpu-memory must be a size such as 5GB"),
    ("estimate config.json --optimizer lion", "error: the optimizer 'lion' is not known"),
    ("estimate config.json --world-size 0", "error: --world-size must be a whole number from 1 to"),
]
CASES = [(f"launch {words} t.py", said) for words, said in LAUNCH]
CASES += [(f"tune {words} t.py", said) for words, said in TUNE]


@pytest.mark.parametrize(("words", "said"), CASES + OTHERS)
def test_wrong_input_ends_with_2_and_one_message(capsys, words: str, said: str):
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    before = sorted(Path().rglob("*"))
    assert run(shlex.split(words)) == 2
    out, err = capsys.readouterr()
    assert said.lower() in err.lower()
    assert "Traceback" not in err
    assert out == ""
    assert sorted(Path().rglob("*")) == before


def test_folder_that_has_been_removed_is_named(tmp_path):
    command = 'cd "$1" && rmdir "$1" && exec "$2" -P -m fsdplaunch launch t.py'
    (tmp_path / "gone").mkdir()
    words = ["sh", "-c", command, "sh", str(tmp_path / "gone"), sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "error: the current folder has been removed" in done.stderr
