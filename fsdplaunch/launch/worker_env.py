"""The variables a launch adds to the caller's: the configuration, and what makes torch behave."""

from collections.abc import Mapping
from pathlib import Path

from fsdplaunch.config.environment import ALLOW_UNSHARDED, RUN_DIR, encode
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.world_size import with_mesh
from fsdplaunch.config.xla import uses_xla
from fsdplaunch.launch.secret_variables import without_secrets
from fsdplaunch.run_dir import FLIGHT_RECORDER

RECORDED_EVENTS = "2000"
"""How many collectives the flight recorder remembers; about 1 MB per rank."""
_GENERAL_NAMES = (2, 9)


def worker_variables(
    config: Config,
    *,
    environ: Mapping[str, str],
    cpus: int,
    workers: int,
    torch_version: tuple[int, int],
    run_dir: Path,
    allow_unsharded: bool,
    ranks: int | None = None,
) -> dict[str, str]:
    """Return the variables that agent and workers get beside the caller's.

    Args:
        config: Resolved configuration.
        environ: The caller's variables; what the user has set there is not overridden by a default of ours.
        cpus: Usable cores of this node.
        workers: Workers on this node.
        torch_version: Of the installed torch, major and minor.
        run_dir: The run's folder.
        allow_unsharded: Let a script end without having sharded a model.
        ranks: Workers over all nodes, where they are known.
    """
    world = workers * config.num_machines if ranks is None else ranks
    # Sizes of meshes as numbers, which other libraries want; secrets once, as the variables they are.
    on_xla = uses_xla(config)
    env = encode(without_secrets(config if on_xla else with_mesh(config, world))[0])
    env[RUN_DIR] = str(run_dir)
    if on_xla:
        env.pop("ACCELERATE_USE_CPU", None)  # PJRT_DEVICE says it; accelerate would do without PyTorch/XLA
    if allow_unsharded:
        env[ALLOW_UNSHARDED] = "1"
    if config.gpu_ids is not None and config.gpu_ids.strip().lower() != "all":
        env["CUDA_VISIBLE_DEVICES"] = config.gpu_ids
    if config.launch.max_restarts or config.launch.nodes:
        # Without it torch keeps one store for all attempts, and new workers meet the dead ones' addresses.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    defaults = {"OMP_NUM_THREADS": str(max(1, cpus // workers)), **_flight_recorder(run_dir, torch_version)}
    if config.launch.keep_global_batch:  # a script that numbers the words of a set numbers them alike on all ranks
        defaults["PYTHONHASHSEED"] = "0"
    env |= {name: value for name, value in defaults.items() if name not in environ}
    return env | config.launch.env


def _flight_recorder(run_dir: Path, torch_version: tuple[int, int]) -> dict[str, str]:
    """Have torch remember the last collectives, and write them down when one of them times out.

    Torch 2.9 gave the variables general names, and warns on every rank where it finds NCCL's.
    """
    size, file = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
    if torch_version < _GENERAL_NAMES:
        size, file = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    dump = str(run_dir / FLIGHT_RECORDER)
    return {size: RECORDED_EVENTS, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", file: dump}
