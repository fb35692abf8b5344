"""The question of what is sharded, put as what matters most, with the memory each answer needs."""

from collections.abc import Mapping
from typing import Any

from fsdplaunch.byte_sizes import GIB
from fsdplaunch.config.resolve import strategy_named
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import Path, keys_by_path
from fsdplaunch.probe.memory_plan import MemoryPlan, Sharding, plan_memory
from fsdplaunch.wizard.questions.question import Choice, Question
from fsdplaunch.wizard.state import WizardState

_STRATEGY: Path = ("fsdp_config", "fsdp_sharding_strategy")
_RESHARD: Path = ("fsdp_config", "fsdp_reshard_after_forward")
_OFFLOAD: Path = ("fsdp_config", "fsdp_offload_params")
_RECOMPUTE: Path = ("fsdp_config", "fsdp_activation_checkpointing")
_REPLICAS: Path = ("parallelism_config", "parallelism_config_dp_replicate_size")
_SHARDS: Path = ("parallelism_config", "parallelism_config_dp_shard_size")


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


def _write_goal(answer: str, state: WizardState) -> Mapping[Path, Any]:
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
