"""Runs with PyTorch/XLA: what it cannot do, and keys that it does not read."""

from collections.abc import Iterator

from fsdplaunch.config.rules.base import RuleContext, Violation, fsdp, mesh, note_rule, rule
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import KeySpec, Path, all_keys, keys_by_path, value_at
from fsdplaunch.config.world_size import node_range
from fsdplaunch.config.xla import is_read_by_xla, runs_spmd, uses_xla

_XLA = ("fsdp_config", "xla")
_SWITCHED = ("xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")


@rule("xla-cannot")
def _cannot(context: RuleContext) -> Iterator[Violation]:
    """Refuse a key that asks for what there is not under PyTorch/XLA."""
    if uses_xla(context.config):
        for about, message, hint in _impossible(context):
            yield Violation(about=(about, _XLA, ("distributed_type",)), message=message, hint=hint)


def _impossible(context: RuleContext) -> Iterator[tuple[Path, str, str]]:
    """Yield the keys of what there is not: where they stand, what is wrong, and what to do."""
    config = context.config
    least, most = node_range(config)
    if config.launch.shard == "always":
        message = "always is not possible under PyTorch/XLA: the script calls what shards"
        yield ("launch", "shard"), message, "use auto"
    if least != most:
        message = f"{config.launch.nodes}: a TPU slice has a fixed number of hosts"
        yield ("launch", "nodes"), message, "use num_machines"
    if config.tpu_use_cluster:
        hint = "run this command on every host, as gcloud's --worker=all does, or use --hosts"
        yield ("tpu_use_cluster",), "true is not supported: fsdplaunch does not call gcloud", hint
    if config.mixed_precision == "fp8":
        yield ("mixed_precision",), "fp8 is not possible under PyTorch/XLA", "use bf16"
    if config.dynamo_config.dynamo_backend != "NO":
        yield ("dynamo_config", "dynamo_backend"), "PyTorch/XLA compiles by itself", "leave it out"
    devices = context.given.xla.cpu_devices
    if devices not in (None, 1) and not runs_spmd(config):
        message = f"{devices}: without xla_fsdp_v2 a process has one device of a CPU"
        yield ("xla", "cpu_devices"), message, "set xla_fsdp_v2: true, or leave it out"
    if context.shards_on_xla:
        yield from _ways_to_shard(context)


def _ways_to_shard(context: RuleContext) -> Iterator[tuple[Path, str, str]]:
    strategy = context.given.fsdp_config.fsdp_sharding_strategy or ""
    if strategy == "NO_SHARD" or strategy.startswith("HYBRID"):
        hint = "use FULL_SHARD or SHARD_GRAD_OP"
        yield fsdp("sharding_strategy"), f"{strategy} is not possible: PyTorch/XLA shards over all devices", hint
    if context.given.fsdp_config.fsdp_state_dict_type == "LOCAL_STATE_DICT":
        yield fsdp("state_dict_type"), "LOCAL_STATE_DICT is FSDP1's, not PyTorch/XLA's", "use SHARDED_STATE_DICT"
    if context.given.fsdp_config.fsdp_ignored_modules is not None:
        message = "PyTorch/XLA's FSDP takes all parameters"
        yield fsdp("ignored_modules"), message, "leave it out"
    for axis in ("tp", "cp"):
        if getattr(context.config.parallelism_config, mesh(axis)[-1]) > 1:
            yield mesh(axis), "layers and sequences are not split under PyTorch/XLA", "leave it out"
    if context.config.checkpoint.weights is not None:
        message = f"{context.config.checkpoint.weights} is not read under PyTorch/XLA"
        yield ("checkpoint", "weights"), message, "load the weights in the script, before prepare"


@note_rule("unread-by-xla")
def _unread(context: RuleContext) -> Iterator[Violation]:
    """Name keys of torch's FSDP that PyTorch/XLA does not read; all in one note."""
    if not context.shards_on_xla:
        return
    unread = [spec for spec in all_keys() if _is_set(context, spec) and not is_read_by_xla(spec.path)]
    if unread:
        others = ", ".join(spec.name for spec in unread[1:])
        message = "PyTorch/XLA decides this by itself" + (f", and {others}" if others else "")
        yield Violation(about=(unread[0].path, _XLA), message=message)


def _is_set(context: RuleContext, spec: KeySpec) -> bool:
    return spec.path in context.set_paths and value_at(context.given, spec.path) is not None


@note_rule("unused-xla-settings")
def _settings(context: RuleContext) -> Iterator[Violation]:
    """Name xla_fsdp_settings under xla_fsdp_v2, which is another class; keys and section without PyTorch/XLA."""
    for spec in () if uses_xla(context.config) else all_keys():
        if spec.path[0] == "xla" and context.sets(spec):
            yield Violation(about=(spec.path, _XLA), message="is read under PyTorch/XLA only")
    for name in _SWITCHED:
        path = ("fsdp_config", name)
        if not context.sets(keys_by_path()[path]):
            continue
        if not context.config.fsdp_config.xla:
            yield Violation(about=(path, _XLA), message="is read under xla: true only")
        elif name == "xla_fsdp_settings" and (message := _unused_settings(context.config)):
            yield Violation(about=(path, _XLA), message=message)


def _unused_settings(config: Config) -> str | None:
    """Return what is to be said of arguments that the class does not look at."""
    if runs_spmd(config):
        return "is not used: they are of the class that xla_fsdp_v2 replaces"
    settings = config.fsdp_config.xla_fsdp_settings
    alone = (
        [] if "sharding_groups" in settings else sorted({"sharding_rank", "sharding_world_size"} & set(settings))
    )
    verb = "is" if len(alone) == 1 else "are"
    return f"{' and '.join(alone)} {verb} not used: without sharding_groups all shard" if alone else None


@note_rule("xla-processes")
def _processes(context: RuleContext) -> Iterator[Violation]:
    """Name num_processes under PyTorch/XLA, which starts as many as there are hosts or devices."""
    number = context.given.num_processes
    if not uses_xla(context.config) or number in ("auto", 1):
        return
    message = f"{number} is left out: PyTorch/XLA has one process per device"
    if runs_spmd(context.config):
        message = f"{number} is for the devices of a CPU only: PyTorch/XLA has one process per host"
    yield Violation(about=(("num_processes",), _XLA), message=message)
