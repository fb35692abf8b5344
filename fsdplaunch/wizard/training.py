"""The questions about training: the model, what is split, the number format, the units, the checkpoints."""

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.keys import Path, keys_by_path
from fsdplaunch.config.resolve import strategy_named
from fsdplaunch.config.schema import Config
from fsdplaunch.config.values import NAMES
from fsdplaunch.probe.hardware import GIB
from fsdplaunch.probe.memory_plan import MemoryPlan, Sharding, plan_memory
from fsdplaunch.probe.model import parse_count, read_model, short_count
from fsdplaunch.wizard.question import TYPE_IT, Choice, Question, Situation

_PRECISION: Path = ("mixed_precision",)
_CHECKPOINTS: Path = ("checkpoint", "dir")
_STRATEGY: Path = ("fsdp_config", "fsdp_sharding_strategy")
_RESHARD: Path = ("fsdp_config", "fsdp_reshard_after_forward")
_OFFLOAD: Path = ("fsdp_config", "fsdp_offload_params")
_RECOMPUTE: Path = ("fsdp_config", "fsdp_activation_checkpointing")
_COPIES: Path = ("parallelism_config", "parallelism_config_dp_replicate_size")
_SHARDS: Path = ("parallelism_config", "parallelism_config_dp_shard_size")
_POLICY: Path = ("fsdp_config", "fsdp_auto_wrap_policy")
_CLASSES: Path = ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
_MIN_SIZE: Path = ("fsdp_config", "fsdp_min_num_params")


def _check_model(text: str, _: Situation) -> str:
    if not text:
        return ""
    try:
        parse_count(text)
    except ValueError:
        read_model(FilePath(text).expanduser())
        return str(FilePath(text).expanduser())
    return text.replace(" ", "").lower()


def memory_of(goal: str, situation: Situation) -> MemoryPlan | None:
    """Return what each GPU would need under a goal, or None where the numbers are not known.

    Args:
        goal: fastest, balanced, hybrid or biggest.
        situation: With the answers about machines and model.
    """
    model, workers = situation.machines.model, situation.workers
    if model is None or model.parameters is None or workers is None:
        return None
    ranks = workers if goal == "hybrid" else workers * situation.num_nodes
    compute = situation.answers.get("precision") or situation.suggestion.config.mixed_precision
    sharding = Sharding(ranks=ranks, compute=compute, reshard=goal != "fastest", offload=goal == "biggest")
    return plan_memory(model, sharding)


def memory_words(goal: str, situation: Situation) -> tuple[str, str | None]:
    """Return the need per GPU in words, and why it does not fit, or None if it does.

    Args:
        goal: The goal.
        situation: With the answers about machines and model.
    """
    plan, limit = memory_of(goal, situation), situation.machines.hardware.gpu_memory_bytes
    if plan is None:
        return "", None
    host = f" and {plan.host / GIB:.1f} of host memory" if plan.host else ""
    if situation.answers.get("where") == "cpu":
        return f"{(plan.gpu + plan.host) / GIB:.1f} GiB of memory per worker", None
    text = f"{plan.gpu / GIB:.1f}" + (f" of {limit / GIB:.0f}" if limit else "") + f" GiB per GPU{host}"
    return text, f"needs {text}" if limit is not None and plan.gpu > limit else None


_GOALS = {
    "balanced": (
        "Balanced: everything is split",
        "FULL_SHARD: each block is gathered for forward, freed, and gathered again for backward.",
    ),
    "fastest": (
        "Fastest: gathered once per step",
        "SHARD_GRAD_OP: parameters stay whole from forward to backward, which saves one gather per block.",
    ),
    "hybrid": (
        "Split inside each machine only",
        "HYBRID_SHARD: every machine holds a whole copy, so that only gradients cross the network.",
    ),
    "biggest": (
        "Biggest model: host memory helps",
        "FULL_SHARD with fsdp_offload_params and fsdp_activation_checkpointing: every step gets slower.",
    ),
}


def _goal_choices(situation: Situation) -> tuple[Choice, ...]:
    choices = []
    for goal, (title, means) in _GOALS.items():
        if goal == "hybrid" and situation.num_nodes == 1:
            continue
        need, too_big = memory_words(goal, situation)
        # The biggest stays possible whatever the numbers say: nothing else would be left to choose.
        disabled = too_big if goal != "biggest" else None
        choices.append(Choice(value=goal, title=title, consequence=need, detail=means, disabled=disabled))
    return tuple(choices)


def _write_goal(answer: str, situation: Situation) -> Mapping[Path, Any]:
    new = situation.version != 1
    if answer == "fastest":
        return {_STRATEGY: "SHARD_GRAD_OP"} | ({_RESHARD: False} if new else {})
    if answer == "hybrid":
        if not new or situation.workers is None:
            return {_STRATEGY: "HYBRID_SHARD"}
        return {_STRATEGY: "HYBRID_SHARD", _COPIES: situation.num_nodes, _SHARDS: situation.workers}
    return {_STRATEGY: "FULL_SHARD"} | ({_OFFLOAD: True, _RECOMPUTE: True} if answer == "biggest" else {})


def _read_goal(config: Config, situation: Situation) -> str | None:
    """The goal whose keys these are, exactly; anything finer is no goal's."""
    fsdp, mesh = config.fsdp_config, config.parallelism_config
    strategy: str | None = fsdp.fsdp_sharding_strategy
    reshard = fsdp.fsdp_reshard_after_forward
    if situation.version == 1 and reshard is not None:
        strategy, reshard = strategy or strategy_named(reshard), None
    plain = mesh == type(mesh)()
    if strategy == "HYBRID_SHARD" and reshard in (None, True) and not fsdp.fsdp_offload_params:
        sizes = (mesh.parallelism_config_dp_replicate_size, mesh.parallelism_config_dp_shard_size)
        fits = plain or sizes == (situation.num_nodes, situation.workers)
        return "hybrid" if fits and situation.num_nodes > 1 else None
    if not plain or strategy not in (None, "FULL_SHARD", "SHARD_GRAD_OP"):
        return None
    keeps = strategy == "SHARD_GRAD_OP" if reshard is None else reshard is False
    if keeps or reshard not in (None, True):
        return "fastest" if keeps and not fsdp.fsdp_offload_params else None
    if not fsdp.fsdp_offload_params:
        return "balanced"
    return "biggest" if fsdp.fsdp_activation_checkpointing else None


def _precision_choices(situation: Situation) -> tuple[Choice, ...]:
    hardware = situation.machines.hardware
    on_cpu = situation.answers.get("where") == "cpu"
    usual = "every GPU here computes it" if hardware.all_have_bf16 else "half the traffic"
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
            disabled="CPUs do not train in it" if on_cpu else None,
        ),
        Choice(value="no", title="no", consequence="the model's own format; nothing is cast"),
    )


def _read_precision(config: Config, _: Situation) -> str | None:
    return config.mixed_precision if config.mixed_precision in ("bf16", "fp16", "no") else None


def _wrap_choices(situation: Situation) -> tuple[Choice, ...]:
    model = situation.machines.model
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


def _check_wrap(text: str, _: Situation) -> str:
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


def _write_wrap(answer: str, _: Situation) -> Mapping[Path, Any]:
    if answer == "none":
        return {_POLICY: "NO_WRAP"}
    if answer.startswith("size:"):
        return {_POLICY: "SIZE_BASED_WRAP", _MIN_SIZE: int(answer.removeprefix("size:"))}
    if answer == "auto":
        return {_POLICY: "TRANSFORMER_BASED_WRAP"}
    return {_POLICY: "TRANSFORMER_BASED_WRAP", _CLASSES: NAMES.parse(answer)}


def _read_wrap(config: Config, _: Situation) -> str | None:
    fsdp = config.fsdp_config
    if fsdp.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        return ",".join(fsdp.fsdp_transformer_layer_cls_to_wrap) or "auto"
    return "none" if fsdp.fsdp_auto_wrap_policy == "NO_WRAP" else f"size:{fsdp.fsdp_min_num_params}"


def _check_folder(text: str, _: Situation) -> str:
    if not text or "\0" in text:
        msg = "must be a folder's name"
        raise ValueError(msg)
    if FilePath(text).expanduser().is_file():
        msg = f"{text} is a file"
        raise ValueError(msg)
    return text


def _write_folder(answer: str, _: Situation) -> Mapping[Path, Any]:
    return {} if answer == keys_by_path()[_CHECKPOINTS].default else {_CHECKPOINTS: answer}


def _model_remark(situation: Situation) -> str:
    model = situation.facts.model
    known = f"; {short_count(model.parameters)} parameters found" if model and model.parameters else ""
    return f"(a size such as 8b will do; Enter skips{known})"


MODEL = Question(
    name="model",
    text="Model folder, or its size",
    help="Folder of the model, or its size such as 8b; not stored, it only feeds the numbers shown.",
    metavar="FOLDER|SIZE",
    keys=(),
    write=lambda answer, situation: {},  # noqa: ARG005
    read=lambda config, situation: "",  # noqa: ARG005
    check=_check_model,
    remark=_model_remark,
)
GOAL = Question(
    name="goal",
    text=keys_by_path()[_STRATEGY].key.question or "",
    help="What matters most: balanced, fastest, hybrid (a copy per machine) or biggest (host memory helps).",
    metavar="balanced|fastest|hybrid|biggest",
    keys=(_STRATEGY, _RESHARD, _OFFLOAD, _COPIES, _SHARDS),
    write=_write_goal,
    read=_read_goal,
    choices=_goal_choices,
)
PRECISION = Question(
    name="precision",
    text=keys_by_path()[_PRECISION].key.question or "",
    help="Number format of forward and backward: bf16, fp16 or no.",
    metavar="bf16|fp16|no",
    keys=(_PRECISION,),
    write=lambda answer, situation: {_PRECISION: answer},  # noqa: ARG005
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
    read=lambda config, situation: config.checkpoint.dir,  # noqa: ARG005
    check=_check_folder,
)
