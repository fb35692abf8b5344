"""Whether a run uses PyTorch/XLA, and in which of its two ways it shards."""

from fsdplaunch.config.schema.config import Config

_SHARDING = ("sharding", "parallelism_config")
_READ = frozenset(
    {
        "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_min_num_params",
        "fsdp_activation_checkpointing",
        "fsdp_ignored_modules",
        "fsdp_state_dict_type",
        "fsdp_sharding_strategy",
        "fsdp_reshard_after_forward",
    }
)
"""Keys of torch's FSDP that mean something to PyTorch/XLA's; the others say what it decides for itself."""


def is_read_by_xla(path: tuple[str, ...]) -> bool:
    """Tell whether a key has a meaning where PyTorch/XLA shards.

    Args:
        path: Where it stands in a file.
    """
    return path[0] not in _SHARDING and (not path[-1].startswith("fsdp_") or path[-1] in _READ)


def uses_xla(config: Config) -> bool:
    """Tell whether workers compute on PyTorch/XLA's devices."""
    return config.distributed_type == "XLA" or (config.distributed_type == "FSDP" and config.fsdp_config.xla)


def shards_on_xla(config: Config) -> bool:
    """Tell whether models are sharded by PyTorch/XLA."""
    return uses_xla(config) and config.fsdp_config.xla


def shards_models(config: Config) -> bool:
    """Tell whether the configuration is about sharding at all, by torch's FSDP or by PyTorch/XLA's."""
    return config.distributed_type == "FSDP" or shards_on_xla(config)


def runs_spmd(config: Config) -> bool:
    """Tell whether one process per host drives all of its devices (SPMD, FSDPv2)."""
    return shards_on_xla(config) and config.fsdp_config.xla_fsdp_v2


def converts_to_bf16(config: Config) -> bool:
    """Tell whether PyTorch/XLA itself makes bf16 of a TPU's floats, as `accelerate launch` has it.

    Models that PyTorch/XLA's FSDP shards have their compute_dtype instead, and keep their parameters.
    """
    return config.distributed_type == "XLA" and config.mixed_precision == "bf16" and not shards_on_xla(config)
