"""Put the files that the installed accelerate writes, by its wizard and by default, into the folder named."""

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


if __name__ == "__main__":
    write(Path(sys.argv[1]))
