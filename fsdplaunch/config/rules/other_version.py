"""Keys that only one FSDP version has, in a run of the other one."""

from collections.abc import Iterator

from fsdplaunch.config.resolve import strategy_named
from fsdplaunch.config.rules.base import RuleContext, Violation, fsdp, note_rule, rule, shown_value
from fsdplaunch.config.rules.sharding import _VERSION
from fsdplaunch.config.schema.walk import Path, all_keys, value_at

_LEFT_OVER: dict[Path, str] = {
    fsdp("backward_prefetch"): "FSDP2 gathers the next unit ahead, as BACKWARD_PRE does",
    fsdp("use_orig_params"): "FSDP2 always shows the model's own parameters",
    fsdp("limit_all_gathers"): "FSDP2 always limits gathers",
}
"""What FSDP2 does, whatever these keys of FSDP1 say."""
_INSTEAD: dict[Path, str] = {
    ("precision", "buffer"): "FSDP2 leaves buffers in their own dtype; leave it out",
    fsdp("activation_checkpointing_offload"): "use fsdp_version: 2, or leave it out",
    ("precision", "output"): "use fsdp_version: 2, or leave it out",
}


@rule("wrong-version")
def _wrong_version(context: RuleContext) -> Iterator[Violation]:
    """Refuse a value of a key of one FSDP version that would be lost under the other."""
    for spec in all_keys():
        if context.version in spec.key.versions or not context.sets(spec) or spec.path in _LEFT_OVER:
            continue
        message = f"{shown_value(value_at(context.given, spec.path))} has no meaning under FSDP{context.version}"
        yield Violation(about=(spec.path, _VERSION), message=message, hint=_INSTEAD.get(spec.path))


@note_rule("key-of-fsdp1")
def _key_of_fsdp1(context: RuleContext) -> Iterator[Violation]:
    """Name a key of FSDP1 in a file for FSDP2, which decides for itself; accelerate drops it as well."""
    for path, what in _LEFT_OVER.items():
        value = value_at(context.given, path)
        if context.version != 1 and path in context.set_paths and value is not None:
            yield Violation(about=(path, _VERSION), message=f"{shown_value(value)} is left out: {what}")


@note_rule("reshard-under-fsdp1")
def _reshard_under_fsdp1(context: RuleContext) -> Iterator[Violation]:
    """Name fsdp_reshard_after_forward: true or false under FSDP1, which goes by the strategy, like accelerate."""
    reshard = context.given.fsdp_config.fsdp_reshard_after_forward
    if context.version != 1 or not isinstance(reshard, bool) or strategy_named(reshard) is not None:
        return
    strategy = context.config.fsdp_config.fsdp_sharding_strategy
    message = f"{shown_value(reshard)} is left out: FSDP1 goes by fsdp_sharding_strategy, here {strategy}"
    yield Violation(about=(fsdp("reshard_after_forward"), _VERSION), message=message)
