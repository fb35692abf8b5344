"""What `check` makes of a configuration, and what `check --compare` found about a script with it.

A launch says whether its script was compared with one process. The verdicts stand in a file beside the runs, by a
digest of the script's text and of the small configuration, so that one verdict holds for any number of workers.
"""

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path

from fsdplaunch.config.environment import encode
from fsdplaunch.config.schema.config import Config
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.run_dir import read_json, write_json

WORKERS = 2
_FILE = "compared.json"


def shrunk(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration for two CPU workers on one node, and what had to change beside that."""
    fsdp, notes = config.fsdp_config, []
    strategy, reshard = fsdp.fsdp_sharding_strategy, fsdp.fsdp_reshard_after_forward
    if strategy is not None and strategy.startswith("HYBRID"):
        inside = "SHARD_GRAD_OP" if strategy.endswith("ZERO2") else "FULL_SHARD"
        notes.append(f"{strategy} needs more than {WORKERS} workers: checked as {inside}")
        strategy = inside  # type: ignore[assignment]
    elif config.parallelism_config.parallelism_config_dp_replicate_size not in (None, 1):
        notes.append(f"the mesh needs more than {WORKERS} workers: checked with one replica of the model")
    if not isinstance(reshard, bool | str | None):
        reshard = True
    if fsdp.fsdp_offload_params:
        notes.append("fsdp_offload_params is left out: it changes nothing without a GPU")
    mesh = replace(
        config.parallelism_config, parallelism_config_dp_replicate_size=1, parallelism_config_dp_shard_size=None
    )
    if strategy == "NO_SHARD":
        mesh = replace(mesh, parallelism_config_dp_replicate_size=WORKERS, parallelism_config_dp_shard_size=1)
    small = replace(
        config,
        use_cpu=True,
        gpu_ids=None,
        num_machines=1,
        machine_rank=None,
        num_processes=WORKERS,
        main_process_ip=None,
        main_process_port=None,
        rdzv_backend="c10d",
        fsdp_config=replace(
            fsdp,
            fsdp_sharding_strategy=strategy,
            fsdp_reshard_after_forward=reshard,
            fsdp_offload_params=False,
        ),
        parallelism_config=mesh,
        launch=replace(
            config.launch, workers_per_node=WORKERS, nodes=None, rendezvous_endpoint=None, max_restarts=0
        ),
    )
    return small, tuple(notes)


def remember(config: Config, target: LaunchTarget, *, equal: bool) -> None:
    """Write down what a comparison found; the configuration is the one before `shrunk`."""
    digest = _digest(config, target)
    if digest is not None:
        file = Path(config.launch.log_dir) / _FILE
        verdict = f"{'equal' if equal else 'different'} on {time.strftime('%Y-%m-%d')}"
        kept = {name: value for name, value in read_json(file).items() if name != digest} | {digest: verdict}
        write_json(file, kept)


def recall(config: Config, target: LaunchTarget) -> str | None:
    """Return what to say about this script with this configuration; None where it cannot be told."""
    digest = _digest(config, target)
    if digest is None:
        return None
    verdict = read_json(Path(config.launch.log_dir) / _FILE).get(digest)
    if isinstance(verdict, str):
        return f"compared with one process: {verdict}"
    return "not compared with one process yet (fsdplaunch check --compare)"


def _digest(config: Config, target: LaunchTarget) -> str | None:
    name = target.name.replace(".", "/")
    files = [Path(name + ".py"), Path(name) / "__main__.py"] if target.is_module else [Path(target.name)]
    script = next((file for file in files if file.is_file()), None)
    if script is None or not target.is_python or not os.access(script, os.R_OK):
        return None
    small = replace(config, launch=replace(config.launch, keep_global_batch=True))
    settings = json.dumps(encode(shrunk(small)[0]), sort_keys=True)
    return hashlib.sha256(script.read_bytes() + settings.encode()).hexdigest()[:32]
