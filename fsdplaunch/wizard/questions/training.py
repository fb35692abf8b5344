"""The questions about training: the model, the dtype, the units, the checkpoints."""

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.kinds import NAMES
from fsdplaunch.config.schema.walk import Path, keys_by_path
from fsdplaunch.probe.hub_models import hub_folder, is_hub_name
from fsdplaunch.probe.model_folder import parse_count, read_model, short_count
from fsdplaunch.wizard.questions.question import TYPE_IT, Choice, Question
from fsdplaunch.wizard.state import WizardState

_PRECISION: Path = ("mixed_precision",)
_CHECKPOINTS: Path = ("checkpoint", "dir")
_POLICY: Path = ("fsdp_config", "fsdp_auto_wrap_policy")
_CLASSES: Path = ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
_MIN_SIZE: Path = ("fsdp_config", "fsdp_min_num_params")


def _check_model(text: str, _: WizardState) -> str:
    if not text:
        return ""
    try:
        parse_count(text)
    except ValueError:
        folder = hub_folder(text) if is_hub_name(text) else FilePath(text).expanduser()
        read_model(folder)
        return text if is_hub_name(text) else str(folder)
    return text.replace(" ", "").lower()


def _precision_choices(state: WizardState) -> tuple[Choice, ...]:
    hardware = state.run_facts.hardware
    on_cpu = state.answers.get("where") == "cpu"
    on_tpus = state.on_tpus
    usual = (
        "TPUs compute in it"
        if on_tpus
        else "every GPU here computes it"
        if hardware.all_have_bf16
        else "half the traffic"
    )
    return (
        Choice(
            value="bf16",
            title="bf16",
            consequence="slow on most CPUs" if on_cpu else usual,
            detail="Parameters and optimizer state are kept in fp32; blocks are gathered and computed in bf16.",
            disabled="a GPU here does not compute it" if hardware.gpus and not hardware.all_have_bf16 else None,
        ),
        Choice(
            value="fp16",
            title="fp16",
            consequence="the script must scale its loss",
            detail="Its narrow range lets small gradients vanish unless the loss is scaled.",
            disabled=f"{'TPUs' if on_tpus else 'CPUs'} do not train in it" if on_cpu or on_tpus else None,
        ),
        Choice(value="no", title="no", consequence="the model's own dtype; nothing is cast"),
    )


def _read_precision(config: Config, _: WizardState) -> str | None:
    return config.mixed_precision if config.mixed_precision in ("bf16", "fp16", "no") else None


def _wrap_choices(state: WizardState) -> tuple[Choice, ...]:
    model = state.run_facts.model
    found = [f"{group.prefix}.* x {group.count}" for group in model.blocks[:2]] if model else []
    return (
        Choice(
            value="auto",
            title="Each repeated block",
            consequence=", ".join(found),
            detail="The classes in the model's own _no_split_modules, else the blocks it repeats.",
        ),
        Choice(value=TYPE_IT, title="Classes or a size that I type", consequence="such as LlamaDecoderLayer"),
        Choice(
            value="none",
            title="The whole model",
            consequence="for small models",
            detail="Everything is gathered at once, and stays gathered from forward to backward.",
        ),
    )


def _check_wrap(text: str, _: WizardState) -> str:
    name, colon, size = text.partition(":")
    if colon and name.strip().lower() == "size":
        try:
            return f"size:{parse_count(size)}"
        except ValueError:
            msg = f"must be size:N with a number of parameters such as size:100m, got {text!r}"
            raise ValueError(msg) from None
    classes = NAMES.parse(text)
    wrong = next((name for name in classes if not name.isidentifier()), None)
    if wrong is not None or not classes:
        msg = f"must be auto, none, size:N or class names separated by commas, got {wrong or text!r}"
        raise ValueError(msg)
    return ",".join(classes)


def _write_wrap(answer: str, _: WizardState) -> Mapping[Path, Any]:
    if answer == "none":
        return {_POLICY: "NO_WRAP"}
    if answer.startswith("size:"):
        return {_POLICY: "SIZE_BASED_WRAP", _MIN_SIZE: int(answer.removeprefix("size:"))}
    if answer == "auto":
        return {_POLICY: "TRANSFORMER_BASED_WRAP"}
    return {_POLICY: "TRANSFORMER_BASED_WRAP", _CLASSES: NAMES.parse(answer)}


def _read_wrap(config: Config, _: WizardState) -> str | None:
    fsdp = config.fsdp_config
    if fsdp.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        return ",".join(fsdp.fsdp_transformer_layer_cls_to_wrap) or "auto"
    return "none" if fsdp.fsdp_auto_wrap_policy == "NO_WRAP" else f"size:{fsdp.fsdp_min_num_params}"


def _check_folder(text: str, _: WizardState) -> str:
    if not text or "\0" in text:
        msg = "must be a folder's name"
        raise ValueError(msg)
    if FilePath(text).expanduser().is_file():
        msg = f"{text} is a file"
        raise ValueError(msg)
    return text


def _write_folder(answer: str, _: WizardState) -> Mapping[Path, Any]:
    return {} if answer == keys_by_path()[_CHECKPOINTS].default else {_CHECKPOINTS: answer}


def _model_remark(state: WizardState) -> str:
    model = state.facts.model
    known = f"; {short_count(model.parameters)} parameters found" if model and model.parameters else ""
    return f"(a size such as 8b will do; Enter skips{known})"


MODEL = Question(
    name="model",
    text="Model folder, or its size",
    help="Folder of the model, its hub name, or its size such as 8b; not stored, it only feeds the numbers shown.",
    metavar="FOLDER|ORG/MODEL|SIZE",
    keys=(),
    write=lambda answer, state: {},  # noqa: ARG005
    read=lambda config, state: "",  # noqa: ARG005
    check=_check_model,
    remark=_model_remark,
)
PRECISION = Question(
    name="precision",
    text=keys_by_path()[_PRECISION].key.question or "",
    help="Dtype of forward and backward: bf16, fp16 or no.",
    metavar="bf16|fp16|no",
    keys=(_PRECISION,),
    write=lambda answer, state: {_PRECISION: answer},  # noqa: ARG005
    read=_read_precision,
    choices=_precision_choices,
)
WRAP = Question(
    name="wrap",
    text=keys_by_path()[_POLICY].key.question or "",
    help="What is gathered as one unit: auto, class names, size:N, or none.",
    metavar="auto|CLASS,...|size:N|none",
    keys=(_POLICY, _CLASSES, _MIN_SIZE),
    write=_write_wrap,
    read=_read_wrap,
    check=_check_wrap,
    choices=_wrap_choices,
    typed="Class names separated by commas, or size:N",
)
CHECKPOINTS = Question(
    name="checkpoint-dir",
    text="Where do checkpoints go?",
    help="Folder for checkpoints when the script names none.",
    metavar="FOLDER",
    keys=(_CHECKPOINTS,),
    write=_write_folder,
    read=lambda config, state: config.checkpoint.dir,  # noqa: ARG005
    check=_check_folder,
)
