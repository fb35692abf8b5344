"""Config <-> environment variables: how a file's values reach the workers, and how workers read them back.

Every key travels under the name its schema field gives; `decode(encode(config)) == config` for every resolved
Config. Runs in the CLI (encode) and in every worker (decode).
"""

import os
from collections.abc import Mapping

from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import Path, all_keys, build_config, keys_by_path, value_at
from fsdplaunch.errors import UsageError

RUN_DIR = "FSDPLAUNCH_RUN_DIR"
"""Contract variable, not a key: the run's folder, where each rank writes its files."""
ALLOW_UNSHARDED = "FSDPLAUNCH_ALLOW_UNSHARDED"
"""Contract variable, not a key: `1` when a script may end without having sharded a model."""
REHEARSAL_STEPS = "FSDPLAUNCH_REHEARSAL_STEPS"
"""Contract variable, not a key: end the script after so many optimizer steps and a checkpoint there and back."""


def encode(config: Config) -> dict[str, str]:
    """Return the variables that carry a resolved Config to its workers, all values text.

    Keys that still hold their default are written too (a worker must not depend on its own defaults), except
    those that nothing reads: accelerate's noise keys, keys of the other FSDP version and keys whose effect is
    pending. None means absent.
    """
    version = config.fsdp_config.fsdp_version
    env = {}
    for spec in all_keys():
        value = value_at(config, spec.path)
        unread = spec.key.noise or spec.key.pending or version not in spec.key.versions or value in ((), {})
        if value is None or (unread and value == spec.default):
            continue
        env[spec.env] = spec.key.kind.write(value)
    return env | _switches(config)


def _switches(config: Config) -> dict[str, str]:
    """Return the on/off variables accelerate and transformers look at before they read any other."""
    switches = {}
    if config.distributed_type == "FSDP":
        switches["ACCELERATE_USE_FSDP"] = "true"
    mesh = config.parallelism_config
    if (mesh.parallelism_config_dp_replicate_size, mesh.parallelism_config_dp_shard_size) != (1, None):
        switches["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    return switches


def raw_values(environ: Mapping[str, str]) -> dict[Path, str]:
    """Return the configuration keys present in an environment, as texts, by path. Empty texts count as absent."""
    found = {spec.path: environ.get(spec.env, "") for spec in all_keys()}
    return {path: text for path, text in found.items() if text != ""}


def decode(environ: Mapping[str, str] | None = None) -> Config:
    """Read the resolved Config back from an environment, in a worker.

    Args:
        environ: The variables; the process's own when left out.

    Raises:
        UsageError: A variable holds none of its key's values.
    """
    values = {}
    for path, text in raw_values(os.environ if environ is None else environ).items():
        spec = keys_by_path()[path]
        try:
            values[path] = spec.key.kind.parse(text)
        except ValueError:
            msg = f"environment variable {spec.env} must be {spec.key.kind.expects}, got {text!r}"
            raise UsageError(msg) from None
    return resolve(build_config(values))
