"""Runs inside a process of its own: what the installed accelerate writes, and what it makes of our files.

python accelerate_peer.py write FOLDER          its wizard's and its default files, as it writes them
python accelerate_peer.py read < requests.json  [{"file": ..., "env": {...}}] -> the plugin of each, as JSON
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch  # noqa: F401  (before accelerate, which looks for it)

ANSWERS = {
    "Which type of machine": 4,  # multi-GPU
    "How many GPU": 4,
    "Do you want to use FullyShardedDataParallel": True,
    "Do you wish to use mixed precision": 2,  # bf16
}


def wizard(folder: Path, name: str, version: int, more: dict[str, object]) -> None:
    """Answer accelerate's questions with its own defaults, apart from ANSWERS and `more`."""
    from accelerate.commands.config import cluster

    answers = {**ANSWERS, "What should be your FSDP version": version - 1, **more}

    def answer(question, default):
        return next((value for words, value in answers.items() if words in question), default)

    def ask_field(question, convert_value=None, default=None, error_message=None):
        given = answer(question, default)
        return "" if given is None else given  # what pressing Enter gives

    def ask_options(question, options=(), convert_value=None, default=0):
        chosen = answer(question, default)
        return convert_value(chosen) if convert_value else chosen

    with (
        mock.patch.object(cluster, "_ask_field", ask_field),
        mock.patch.object(cluster, "_ask_options", ask_options),
    ):
        cluster.get_cluster_input().to_yaml_file(folder / name)


def write(folder: Path) -> None:
    """Put the files accelerate makes into a folder."""
    from accelerate.commands.config.default import write_basic_config

    mesh = {"use the parallelism config": True, "data parallelism replicate size": 2, "FSDP shard size": 2}
    machines = {
        "How many different machines": 2,
        "What is the rank of this machine": 1,
        "IP address": "10.0.0.1",
        "port": 29501,
        "no_split_modules": False,
        "Specify the comma-separated list of transformer layer": "LlamaDecoderLayer,LlamaRMSNorm",
    }
    wizard(folder, "fsdp1.yaml", 1, {"What should be your sharding strategy": 1})  # SHARD_GRAD_OP
    wizard(folder, "fsdp1_hybrid.yaml", 1, {**machines, "What should be your sharding strategy": 3})
    wizard(folder, "fsdp2.yaml", 2, {})
    wizard(folder, "fsdp2_mesh.yaml", 2, mesh)
    wizard(folder, "fsdp2_two_machines.yaml", 2, machines)
    wizard(folder, "ddp.yaml", 2, {"Do you want to use FullyShardedDataParallel": False})
    write_basic_config("bf16", folder / "default.yaml")


def launch_environment(path: str) -> dict[str, str]:
    """The variables `accelerate launch --config_file PATH` would give its workers."""
    from accelerate.commands import launch as launcher
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = launcher.launch_command_parser().parse_args(["--config_file", path, "script.py"])
    args, _, _ = launcher._validate_launch_command(args)
    before = dict(os.environ)
    made = prepare_multi_gpu_env(args)
    return {name: value for name, value in made.items() if before.get(name) != value} | {
        "use_fsdp": str(args.use_fsdp),
        "num_processes": str(args.num_processes),
    }


def plugin(environ: dict[str, str]) -> dict[str, str]:
    """Every field of accelerate's plugin in a worker with these variables."""
    from accelerate.utils import dataclasses as fields

    with (
        mock.patch.dict(os.environ, environ),
        mock.patch.object(fields, "is_cuda_available", lambda: True),
        mock.patch("torch.cuda.current_device", lambda: 0),
    ):
        made = fields.FullyShardedDataParallelPlugin()
        mesh = fields_of_mesh(environ)
    names = [name for name in made.__dataclass_fields__ if name != "param_init_fn"]
    return {name: str(getattr(made, name)) for name in names} | mesh


def fields_of_mesh(environ: dict[str, str]) -> dict[str, str]:
    from accelerate.parallelism_config import ParallelismConfig

    if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") != "true":
        return {"mesh": "none"}
    made = ParallelismConfig()
    return {"mesh": f"{made.dp_replicate_size} x {made.dp_shard_size} x {made.tp_size} x {made.cp_size}"}


def read() -> None:
    for name in [name for name in os.environ if name.startswith(("FSDP", "ACCELERATE", "PARALLELISM"))]:
        del os.environ[name]
    answers = []
    for request in json.load(sys.stdin):
        theirs = launch_environment(request["file"])
        answers.append({"env": theirs, "theirs": plugin(theirs), "ours": plugin(request["env"])})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        read()
