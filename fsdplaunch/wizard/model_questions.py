"""The questions about the model: what it is, what is sharded, the dtype, the units, the checkpoints."""

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.resolve import strategy_named
from fsdplaunch.config.schema.config import Config, KeyPath, keys_by_path
from fsdplaunch.config.schema.kinds import NAMES
from fsdplaunch.display_text import GIB
from fsdplaunch.probe.memory_plan import MemoryPlan, Sharding, plan_memory
from fsdplaunch.probe.model_files import hub_folder, is_hub_name, parse_count, read_model, short_count
from fsdplaunch.wizard.question import TYPE_IT, Choice, Question
from fsdplaunch.wizard.state import WizardState

_STRATEGY: KeyPath = ("fsdp_config", "fsdp_sharding_strategy")
_RESHARD: KeyPath = ("fsdp_config", "fsdp_reshard_after_forward")
_OFFLOAD: KeyPath = ("fsdp_config", "fsdp_offload_params")
_RECOMPUTE: KeyPath = ("fsdp_config", "fsdp_activation_checkpointing")
_REPLICAS: KeyPath = ("parallelism_config", "parallelism_config_dp_replicate_size")
_SHARDS: KeyPath = ("parallelism_config", "parallelism_config_dp_shard_size")


def memory_of(goal: str, state: WizardState) -> MemoryPlan | None:
    """Return what each GPU would need under a goal, or None where the numbers are not known.

    Args:
        goal: fastest, balanced, hybrid or biggest.
        state: With the answers about nodes and model.
    """
    model, workers = state.run_facts.model, state.workers
    if model is None or model.parameters is None or workers is None:
        return None
    ranks = workers if goal == "hybrid" else workers * state.num_nodes
    compute = state.answers.get("precision") or state.suggestion.config.mixed_precision
    sharding = Sharding(ranks=ranks, compute=compute, reshard=goal != "fastest", offload=goal == "biggest")
    return plan_memory(model, sharding)


def memory_words(goal: str, state: WizardState) -> tuple[str, str | None]:
    """Return the need per GPU in words, and why it does not fit, or None if it does.

    Args:
        goal: The goal.
        state: With the answers about nodes and model.
    """
    if state.on_tpus:
        return "", None  # the estimate is of GPUs
    plan, limit = memory_of(goal, state), state.run_facts.hardware.gpu_memory_bytes
    if plan is None:
        return "", None
    host = f" and {plan.host / GIB:.1f} of host memory" if plan.host else ""
    if state.answers.get("where") == "cpu":
        return f"{(plan.gpu + plan.host) / GIB:.1f} GiB of memory per worker", None
    text = f"{plan.gpu / GIB:.1f}" + (f" of {limit / GIB:.0f}" if limit else "") + f" GiB per GPU{host}"
    return text, f"needs {text}" if limit is not None and plan.gpu > limit else None


_GOALS = {
    "balanced": (
        "Balanced: everything is sharded",
        "FULL_SHARD: each block is gathered for forward, freed, and gathered again for backward.",
    ),
    "fastest": (
        "Fastest: gathered once per step",
        "SHARD_GRAD_OP: parameters stay gathered from forward to backward, which saves one gather per block.",
    ),
    "hybrid": (
        "Shard inside each node only",
        "HYBRID_SHARD: every node holds a full replica, so that only gradients cross the network.",
    ),
    "biggest": (
        "Biggest model: host memory helps",
        "FULL_SHARD with fsdp_offload_params and fsdp_activation_checkpointing: every step gets slower.",
    ),
}


def _possible(state: WizardState) -> tuple[str, ...]:
    """Return the goals that there are; PyTorch/XLA shards over all devices, and SPMD in one way only."""
    if not state.on_tpus:
        return tuple(_GOALS)
    return ("balanced",) if state.answers.get("xla") == "spmd" else ("balanced", "fastest")


def _goal_choices(state: WizardState) -> tuple[Choice, ...]:
    choices = []
    for goal, (title, means) in _GOALS.items():
        if (goal == "hybrid" and state.num_nodes == 1) or goal not in _possible(state):
            continue
        need, too_big = memory_words(goal, state)
        # The biggest stays possible whatever the numbers say: nothing else would be left to choose.
        disabled = too_big if goal != "biggest" else None
        choices.append(Choice(value=goal, title=title, consequence=need, detail=means, disabled=disabled))
    return tuple(choices)


def _write_goal(answer: str, state: WizardState) -> Mapping[KeyPath, Any]:
    new = state.version != 1
    if answer == "fastest":
        return {_STRATEGY: "SHARD_GRAD_OP"} | ({_RESHARD: False} if new else {})
    if answer == "hybrid":
        if not new or state.workers is None:
            return {_STRATEGY: "HYBRID_SHARD"}
        return {_STRATEGY: "HYBRID_SHARD", _REPLICAS: state.num_nodes, _SHARDS: state.workers}
    return {_STRATEGY: "FULL_SHARD"} | ({_OFFLOAD: True, _RECOMPUTE: True} if answer == "biggest" else {})


def _read_goal(config: Config, state: WizardState) -> str | None:
    """Return the goal whose keys these are, exactly; anything finer is no goal's."""
    fsdp, mesh = config.fsdp_config, config.parallelism_config
    strategy: str | None = fsdp.fsdp_sharding_strategy
    reshard = fsdp.fsdp_reshard_after_forward
    if state.version == 1 and reshard is not None:
        strategy, reshard = strategy or strategy_named(reshard), None
    plain = mesh == type(mesh)()
    if strategy == "HYBRID_SHARD" and reshard in (None, True) and not fsdp.fsdp_offload_params:
        sizes = (mesh.parallelism_config_dp_replicate_size, mesh.parallelism_config_dp_shard_size)
        fits = plain or sizes == (state.num_nodes, state.workers)
        return "hybrid" if fits and state.num_nodes > 1 else None
    if not plain or strategy not in (None, "FULL_SHARD", "SHARD_GRAD_OP"):
        return None
    keeps = strategy == "SHARD_GRAD_OP" if reshard is None else reshard is False
    if keeps or reshard not in (None, True):
        return "fastest" if keeps and not fsdp.fsdp_offload_params else None
    if not fsdp.fsdp_offload_params:
        return "balanced"
    return "biggest" if fsdp.fsdp_activation_checkpointing else None


GOAL = Question(
    name="goal",
    text=keys_by_path()[_STRATEGY].key.question or "",
    help="What matters most: balanced, fastest, hybrid (a replica per node) or biggest (host memory helps).",
    metavar="balanced|fastest|hybrid|biggest",
    keys=(_STRATEGY, _RESHARD, _OFFLOAD, _REPLICAS, _SHARDS),
    write=_write_goal,
    read=_read_goal,
    asked=lambda state: len(_possible(state)) > 1,
    choices=_goal_choices,
)


_PRECISION: KeyPath = ("mixed_precision",)
_CHECKPOINTS: KeyPath = ("checkpoint", "dir")
_POLICY: KeyPath = ("fsdp_config", "fsdp_auto_wrap_policy")
_CLASSES: KeyPath = ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
_MIN_SIZE: KeyPath = ("fsdp_config", "fsdp_min_num_params")


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


def _write_wrap(answer: str, _: WizardState) -> Mapping[KeyPath, Any]:
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


def _write_folder(answer: str, _: WizardState) -> Mapping[KeyPath, Any]:
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
