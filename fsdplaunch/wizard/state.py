"""What is known and answered so far, and the configuration to suggest for it, with a reason for every value."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from fsdplaunch.config.resolve import CPU_WORKERS, default_version
from fsdplaunch.config.schema.config import Config, KeyPath, build_config, keys_by_path
from fsdplaunch.display_text import GIB
from fsdplaunch.features import ESTIMATE, feature
from fsdplaunch.probe.hardware import Hardware
from fsdplaunch.probe.scheduler import Cluster

_SPARE, _HOST_SPARE = 0.8, 0.6  # shares of a GPU's and of the host's memory that a plan may fill


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestionFacts:
    """What is known before the first question."""

    hardware: Hardware  # this machine
    cluster: Cluster  # the job it runs in
    model: Any = None  # the one that was named, as `fsdplaunch estimate` has it; None for none
    on_tpus: bool = False  # whether PyTorch/XLA is to shard, on TPUs
    # Whether the run uses other nodes too, or instead: no GPU here does not mean none there.
    elsewhere: bool = False

    @property
    def gpus_per_node(self) -> int:
        """Return GPUs on each node: what is seen here, else what the scheduler gave."""
        return len(self.hardware.gpus) or self.cluster.gpus_on_node or 0

    @property
    def num_nodes(self) -> int:
        """Return the nodes of the job, 1 when nothing says how many."""
        return self.cluster.num_nodes or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A configuration for a run."""

    values: Mapping[KeyPath, Any]  # what to write, by path, whether or not it equals the default
    reasons: Mapping[str, str]  # why, by dotted key
    notes: tuple[str, ...] = ()  # what the reader should know and no key can say

    @property
    def config(self) -> Config:
        """Return the same as a configuration."""
        return build_config(self.values)


_Reasoned = dict[KeyPath, tuple[Any, str]]  # values, each with its reason


def suggest_for(facts: SuggestionFacts) -> Suggestion:
    """Return the configuration that suits the nodes of a run, their job and the model, as far as known."""
    chosen = _layout(facts) | _mixed_precision(facts) | _sharding(facts)
    return Suggestion(
        values={path: value for path, (value, _) in chosen.items()},
        reasons={".".join(path): reason for path, (_, reason) in chosen.items()},
        notes=tuple(_notes(facts)),
    )


def _layout(facts: SuggestionFacts) -> _Reasoned:
    if facts.on_tpus:  # PyTorch/XLA has one process per chip or per host
        return {("fsdp_config", "xla"): (True, "PyTorch/XLA shards on TPUs")}
    nodes, per_node = facts.num_nodes, facts.gpus_per_node
    chosen: _Reasoned = {("num_machines",): (nodes, "nodes of this run")} if nodes > 1 else {}
    if per_node > 0:
        each = f"one for each of {per_node} GPUs"
        reason = f"{each} on {nodes} nodes" if nodes > 1 else each if per_node > 1 else "one GPU"
        return chosen | {("num_processes",): (nodes * per_node, reason)}
    if facts.elsewhere:
        return chosen | {("launch", "workers_per_node"): ("auto", "the GPUs are not seen from here")}
    return {
        ("use_cpu",): (True, "no GPU was found"),
        ("num_processes",): (CPU_WORKERS, "the fewest workers that share a model"),
    }


def _mixed_precision(facts: SuggestionFacts) -> _Reasoned:
    dtype = "bf16" if facts.on_tpus or facts.hardware.all_have_bf16 else "no"
    if dtype == "bf16":
        reason = "TPUs compute in bf16" if facts.on_tpus else "every GPU here supports bf16"
    elif facts.hardware.gpus:
        reason = "a GPU here does not support bf16"
    else:
        unseen = facts.elsewhere or facts.gpus_per_node > 0
        reason = "the GPUs are not seen from here" if unseen else "without a GPU bf16 is slower"
    return {("mixed_precision",): (dtype, reason)}


def _sharding(facts: SuggestionFacts) -> _Reasoned:
    section, memory = "fsdp_config", facts.hardware.memory_bytes
    chosen: _Reasoned = {
        ("distributed_type",): ("FSDP", "shard the model"),
        (section, "fsdp_sharding_strategy"): ("FULL_SHARD", "least memory per worker"),
        (section, "fsdp_auto_wrap_policy"): ("TRANSFORMER_BASED_WRAP", "each repeated block is one unit"),
        (section, "fsdp_state_dict_type"): ("SHARDED_STATE_DICT", "every worker writes its own shards"),
    }
    if facts.on_tpus:
        return chosen
    chosen[section, "fsdp_version"] = 2, "the implementation torch develops"
    if _offloaded(facts) is not None:
        for name in ("fsdp_offload_params", "fsdp_activation_checkpointing"):
            chosen[section, name] = True, "the model does not fit the GPUs otherwise"
    workers = facts.gpus_per_node or CPU_WORKERS
    loaded = workers * facts.model.sizes.stored if facts.model and workers > 1 else 0
    if memory is not None and loaded > _HOST_SPARE * memory:
        reason = "every worker loading the full model would fill this machine's memory"
        chosen[section, "fsdp_cpu_ram_efficient_loading"] = True, reason
    return chosen


def _offloaded(facts: SuggestionFacts) -> Any:
    """Return what offloading leaves in use, where the GPUs do not hold the model otherwise; else None."""
    memory = facts.hardware.gpu_memory_bytes
    if memory is None or facts.model is None:
        return None
    ranks = max(1, facts.gpus_per_node * facts.num_nodes)
    need = partial(
        feature(ESTIMATE).before_activations, facts.model, ranks=ranks, mixed=facts.hardware.all_have_bf16
    )
    return need(offload=True) if need().gpu > _SPARE * memory else None


def _notes(facts: SuggestionFacts) -> list[str]:
    notes = []
    seen, given = len(facts.hardware.gpus), facts.cluster.gpus_on_node
    if given and seen and seen != given:
        notes.append(f"the scheduler gave {given} GPUs to this node, {seen} are visible")
    if facts.gpus_per_node == 1 and facts.num_nodes == 1:
        notes.append("with one GPU nothing is sharded; sharding starts to save memory at two")
    plan, memory, host = _offloaded(facts), facts.hardware.gpu_memory_bytes or 0, facts.hardware.memory_bytes
    if plan is not None and plan.gpu > _SPARE * memory:
        notes.append(f"even offloaded, {plan.gpu / GIB:.1f} of {memory / GIB:.0f} GiB per GPU would be in use")
    need = plan.host * facts.gpus_per_node if plan is not None else 0
    if host is not None and need > host:
        notes.append(f"offloading needs {need / GIB:.0f} GiB of host memory here, there are {host / GIB:.0f}")
    return notes


VERSION: KeyPath = ("fsdp_config", "fsdp_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class WizardState:
    """Everything a question may depend on."""

    facts: SuggestionFacts  # what was found on this machine
    answers: Mapping[str, str] = field(default_factory=dict)  # canonical answers so far, by question name
    # Values of the file that is edited, by path; empty for a new file.
    base: Mapping[KeyPath, Any] = field(default_factory=dict)
    editing: bool = False  # whether `base` is a file's
    # Values set by key, which no question may change; None takes a key back.
    settings: Mapping[KeyPath, Any] = field(default_factory=dict)

    def answering(self, name: str, answer: str) -> "WizardState":
        """Return the state after one more answer."""
        return replace(self, answers={**self.answers, name: answer})

    def without(self, name: str) -> "WizardState":
        """Return the state without the answer to a question."""
        return replace(self, answers={key: text for key, text in self.answers.items() if key != name})

    @property
    def version(self) -> int:
        """Return the FSDP version the answers will be written for."""
        said = self.settings.get(VERSION) or self.base.get(VERSION)
        if said or not self.editing:
            return int(said or 2)  # new files are for FSDP2
        of_fsdp1 = (1,) in [keys_by_path()[path].key.versions for path in self.base]
        return 1 if of_fsdp1 else default_version(build_config(self.base))

    @property
    def num_nodes(self) -> int:
        """Return the nodes of the run, as far as answered."""
        return int(self.answers.get("nodes", 1))

    @property
    def on_tpus(self) -> bool:
        """Return whether PyTorch/XLA shards."""
        return self.run_facts.on_tpus

    @property
    def workers(self) -> int | None:
        """Return workers per node; None when each node decides and none can be seen from here."""
        answer = self.answers.get("workers-per-node", "auto")
        if answer.isdecimal():
            return int(answer)
        return self.run_facts.gpus_per_node or None

    @property
    def run_facts(self) -> SuggestionFacts:
        """Return the facts, as far as they hold for the nodes of the run."""
        where = self.answers.get("where")
        found = replace(self.facts, model=named_model(self.answers.get("model", "")))
        if where in ("cpu", "tpu"):
            hardware = replace(found.hardware, gpus=(), notes=())
            return replace(found, hardware=hardware, cluster=Cluster(), on_tpus=where == "tpu")
        if where is not None:
            found = replace(found, on_tpus=False)
        chosen = self.answers.get("workers-per-node", "")
        if chosen.isdecimal():
            found = replace(found, hardware=replace(found.hardware, gpus=found.hardware.gpus[: int(chosen)]))
        if where in ("machines", "slurm"):
            nodes = int(self.answers["nodes"]) if "nodes" in self.answers else found.cluster.num_nodes
            return replace(found, cluster=replace(found.cluster, num_nodes=nodes), elsewhere=True)
        if where == "here":
            return replace(found, cluster=Cluster(), elsewhere=not found.hardware.gpus)
        return found

    @property
    def suggestion(self) -> Suggestion:
        """Return what would be suggested, given the answers so far."""
        return suggest_for(self.run_facts)


@cache
def named_model(answer: str) -> Any:
    """Return the model that an answer names, as `fsdplaunch estimate` reads it; None for no answer."""
    return feature(ESTIMATE).read_named(answer).model if answer else None
