"""The questions about PyTorch/XLA, on TPUs: which of its classes, gradient checkpointing, the arguments."""

import json
from collections.abc import Mapping
from typing import Any

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.parsers import write
from fsdplaunch.config.schema.walk import Path
from fsdplaunch.config.schema.xla import parse_xla_settings
from fsdplaunch.wizard.questions.question import Choice, Question
from fsdplaunch.wizard.state import WizardState

_SPMD: Path = ("fsdp_config", "xla_fsdp_v2")
_RECOMPUTE: Path = ("fsdp_config", "xla_fsdp_grad_ckpt")
_SETTINGS: Path = ("fsdp_config", "xla_fsdp_settings")
SETTINGS_FORM = "must be name=value, separated by commas, such as compute_dtype=bfloat16,flatten_parameters=true"


def _class_choices(_: WizardState) -> tuple[Choice, ...]:
    return (
        Choice(
            value="wrapper",
            title="One process per chip",
            consequence="XlaFullyShardedDataParallel",
            detail="xla_fsdp_settings are its arguments; checkpoints are written by each process.",
        ),
        Choice(
            value="spmd",
            title="One process per host (SPMD)",
            consequence="xla_fsdp_v2",
            detail="It has the whole batch, and the compiler splits batch and parameters over all devices.",
        ),
    )


def _recompute_choices(_: WizardState) -> tuple[Choice, ...]:
    return (
        Choice(value="no", title="Keep activations", consequence="the faster step"),
        Choice(value="yes", title="Compute them again in backward", consequence="less memory"),
    )


def _table(text: str) -> Any:
    """Read arguments as they are typed: name=value, separated by commas, or JSON."""
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(SETTINGS_FORM) from None
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(SETTINGS_FORM)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _text(settings: Mapping[str, Any]) -> str:
    if any(isinstance(value, list) or "," in write(value) for value in settings.values()):
        return json.dumps(dict(settings))
    return ",".join(f"{name}={write(value)}" for name, value in settings.items())


def _check_settings(text: str, _: WizardState) -> str:
    return _text(parse_xla_settings(_table(text)))


def _write_settings(answer: str, _: WizardState) -> Mapping[Path, Any]:
    return {_SETTINGS: parse_xla_settings(_table(answer))} if answer else {}


def _read_class(config: Config, _: WizardState) -> str:
    return "spmd" if config.fsdp_config.xla_fsdp_v2 else "wrapper"


def _read_recompute(config: Config, _: WizardState) -> str:
    return "yes" if config.fsdp_config.xla_fsdp_grad_ckpt else "no"


def _on_tpus(state: WizardState) -> bool:
    return state.on_tpus


def _with_arguments(state: WizardState) -> bool:
    return state.on_tpus and state.answers.get("xla") == "wrapper"


XLA = Question(
    name="xla",
    text="Which of PyTorch/XLA's ways to shard?",
    help="On TPUs: wrapper (XlaFullyShardedDataParallel, a process per chip) or spmd (xla_fsdp_v2, one per host).",
    metavar="wrapper|spmd",
    keys=(_SPMD,),
    write=lambda answer, state: {_SPMD: answer == "spmd"},  # noqa: ARG005
    read=_read_class,
    choices=_class_choices,
    applies=_on_tpus,
)
XLA_GRAD_CKPT = Question(
    name="xla-grad-ckpt",
    text="Activations?",
    help="On TPUs: yes computes each unit's activations again in backward (xla_fsdp_grad_ckpt).",
    metavar="yes|no",
    keys=(_RECOMPUTE,),
    write=lambda answer, state: {_RECOMPUTE: answer == "yes"},  # noqa: ARG005
    read=_read_recompute,
    choices=_recompute_choices,
    applies=_on_tpus,
)
XLA_SETTINGS = Question(
    name="xla-settings",
    text="Arguments of XlaFullyShardedDataParallel",
    help="On TPUs, for --xla wrapper: xla_fsdp_settings as name=value,..., such as compute_dtype=bfloat16.",
    metavar="NAME=VALUE,...",
    keys=(_SETTINGS,),
    write=_write_settings,
    read=lambda config, state: _text(config.fsdp_config.xla_fsdp_settings),  # noqa: ARG005
    check=_check_settings,
    applies=_with_arguments,
    decided_by=lambda state: "xla" if state.on_tpus else "where",
    remark=lambda state: "(name=value, separated by commas; Enter: none)",  # noqa: ARG005
)
