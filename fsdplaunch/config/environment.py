"""Config <-> environment variables: how a file's values reach the workers, and how workers read them back.

Every key travels under the name its schema field gives; `decode(encode(config)) == config` for every resolved
Config. Runs in the CLI (encode) and in every worker (decode).
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fsdplaunch.config.resolve import has_one_axis, resolve, uses_xla
from fsdplaunch.config.schema.config import Config, KeyPath, all_keys, build_config, keys_by_path, value_at
from fsdplaunch.config.schema.kinds import write
from fsdplaunch.errors import UsageError
from fsdplaunch.run_dir import PLAN, RUN_DIR

# Contract variables, not keys.
DEVICE = "FSDPLAUNCH_DEVICE"  # what the plan says that workers compute on: `cuda`, `cpu` or `xla`
ALLOW_UNSHARDED = "FSDPLAUNCH_ALLOW_UNSHARDED"  # `1` when a script may end without having sharded a model
REHEARSAL_STEPS = "FSDPLAUNCH_REHEARSAL_STEPS"
"""End the script after so many optimizer steps and a checkpoint there and back."""
COMPARED = "FSDPLAUNCH_COMPARED"  # whether this script with this configuration was compared with one process
COMPARE_DIR = "FSDPLAUNCH_COMPARE_DIR"
"""Where each process of `fsdplaunch check --compare` writes what it computed."""
COMPARE_CHANGED = "FSDPLAUNCH_COMPARE_CHANGED"
"""`1` where one process of a comparison changes its weights in their last digits."""
MEASURE_STEPS = "FSDPLAUNCH_MEASURE_STEPS"
"""End the script after so many optimizer steps, and write down what they took."""
MEASURE_SCRATCH = "FSDPLAUNCH_MEASURE_SCRATCH"  # the folder that a measured script may write to
MEASURE_SOURCE = "FSDPLAUNCH_MEASURE_SOURCE"  # the user's folder, in which a measured script writes nothing
_CONTRACT = (
    *(RUN_DIR, DEVICE, ALLOW_UNSHARDED, REHEARSAL_STEPS, COMPARED, COMPARE_DIR, COMPARE_CHANGED),
    *(MEASURE_STEPS, MEASURE_SCRATCH, MEASURE_SOURCE),
)
_SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
"""What accelerate and transformers look at before they read any other variable."""
_FLOAT8_OVERRIDES = tuple(f"ACCELERATE_FP8_OVERRIDE_{name}" for name in ("FPROP", "DGRAD", "WGRAD"))
"""What accelerate reads fp8_config.override_linear_precision from, where TransformerEngine computes."""


def encode(config: Config) -> dict[str, str]:
    """Return the variables that carry a resolved Config to its workers, all values text.

    Keys that still hold their default are written too (a worker must not depend on its own defaults), except
    those that nothing reads: what accelerate writes for others, keys of the other FSDP version. None means absent.
    """
    version = config.fsdp_config.fsdp_version
    env = {}
    for spec in all_keys():
        value = value_at(config, spec.path)
        # A script's Accelerator reads it.
        float8 = spec.path[0] == "fp8_config" and config.mixed_precision == "fp8"
        unread = (spec.key.unread and not float8) or version not in spec.key.versions or value in ((), {})
        unread = unread or (spec.name.startswith("xla") and not uses_xla(config))
        if value is None or (unread and value == spec.default):
            continue
        env[spec.env] = spec.key.kind.write(value)
    if config.mixed_precision == "fp8":
        given = zip(_FLOAT8_OVERRIDES, config.fp8_config.override_linear_precision, strict=True)
        env |= {variable: write(higher) for variable, higher in given}
    if uses_xla(config):  # it shards in its own way, and has no mesh of theirs
        return env
    if config.distributed_type == "FSDP":
        env[_SWITCHES[0]] = "true"
    # Types under which accelerate's launcher hands parallelism_config on to a script's Accelerator.
    if config.distributed_type in ("FSDP", "MULTI_GPU") and not has_one_axis(config):
        env[_SWITCHES[1]] = "true"
    return env


def without_run(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that carry a run's configuration to its workers."""
    carriers = {*_CONTRACT, *_SWITCHES, *_FLOAT8_OVERRIDES, *(variable for _, variable in _variables())}
    return {name: value for name, value in environ.items() if name not in carriers}


def outside_of_run(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment as it was before the run that this process belongs to, if it does, set its variables.

    Those that somebody has changed since stay: a script that launches another run may set them for that one.
    """
    if RUN_DIR not in environ:
        return environ
    try:
        plan = json.loads((Path(environ[RUN_DIR]) / PLAN).read_text(encoding="utf-8"))["env"]
    except (OSError, ValueError, KeyError):
        plan = {}
    changed = {name: value for name, value in environ.items() if plan.get(name, value) != value}
    return without_run(environ) | changed


def raw_values(environ: Mapping[str, str]) -> dict[KeyPath, str]:
    """Return the configuration keys present in an environment, as texts, by path. Empty texts count as absent."""
    found = {path: environ.get(variable, "") for path, variable in _variables()}
    return {path: text for path, text in found.items() if text != ""}


@cache
def _variables() -> tuple[tuple[KeyPath, str], ...]:
    return tuple((spec.path, spec.env) for spec in all_keys())


def decode(environ: Mapping[str, str] | None = None) -> Config:
    """Read the resolved Config back from an environment, the process's own when left out.

    As long as the variables stay as they are, every call returns the same object.

    Raises:
        UsageError: A variable holds none of its key's values.
    """
    return _decoded(tuple(raw_values(os.environ if environ is None else environ).items()))


@lru_cache(maxsize=1)
def _decoded(texts: tuple[tuple[KeyPath, str], ...]) -> Config:
    return resolve(build_config(_parsed(texts)))


def decode_with(overrides: Mapping[KeyPath, Any], *, replaced: Collection[KeyPath] = ()) -> Config:
    """Read the process's own environment with parsed values on top of it, resolved together, without `replaced`.

    Raises:
        UsageError: A variable holds none of its key's values.
    """
    texts = {path: text for path, text in raw_values(os.environ).items() if path not in replaced}
    return resolve(build_config({**_parsed(texts.items()), **overrides}))


def _parsed(texts: Iterable[tuple[KeyPath, str]]) -> dict[KeyPath, Any]:
    return {
        path: parse_value(path, text, f"environment variable {keys_by_path()[path].env}") for path, text in texts
    }


def parse_value(path: KeyPath, value: Any, what: str) -> Any:
    """Return a value, a text or what Python code gives, as its key holds it; `what` names it in the message.

    Raises:
        UsageError: It is none of the key's values.
    """
    kind = keys_by_path()[path].key.kind
    try:
        return kind.parse(value)
    except ValueError:
        msg = f"{what} must be {kind.expects}, got {value!r}"
        raise UsageError(msg) from None
