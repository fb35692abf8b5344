"""Whether a run uses PyTorch/XLA, and in which of its two ways it shards."""

from fsdplaunch.config.schema.config import Config


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
