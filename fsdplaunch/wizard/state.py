"""What is known and answered so far: everything that a question, a suggestion or a text may depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.resolve import default_version
from fsdplaunch.config.schema.walk import Path, build_config, keys_by_path
from fsdplaunch.probe.hub_models import hub_folder, is_hub_name
from fsdplaunch.probe.model_folder import ModelFacts, parse_count, read_model, sized_model
from fsdplaunch.probe.scheduler import Cluster
from fsdplaunch.wizard.suggest import Suggestion, SuggestionFacts, suggest_for

VERSION: Path = ("fsdp_config", "fsdp_version")
NEWEST = 2
"""The FSDP version of new files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WizardState:
    """Everything a question may depend on.

    Attributes:
        facts: What was found on this machine.
        answers: Canonical answers so far, by question name.
        base: Values of the file that is edited, by path; empty for a new file.
        editing: Whether `base` is a file's.
        settings: Values set by key, which no question may change; None takes a key back.
    """

    facts: SuggestionFacts
    answers: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[Path, Any] = field(default_factory=dict)
    editing: bool = False
    settings: Mapping[Path, Any] = field(default_factory=dict)

    def answering(self, name: str, answer: str) -> "WizardState":
        """Return the state after one more answer."""
        return replace(self, answers={**self.answers, name: answer})

    def without(self, name: str) -> "WizardState":
        """Return the state without the answer to a question."""
        return replace(self, answers={key: text for key, text in self.answers.items() if key != name})

    @property
    def version(self) -> int:
        """Return the FSDP version the answers will be written for."""
        return int(self.settings.get(VERSION) or self.base.get(VERSION) or (1 if self._is_old else NEWEST))

    @property
    def _is_old(self) -> bool:
        """Tell whether the edited file means FSDP1 without setting fsdp_version."""
        if not self.editing:
            return False
        versions = [keys_by_path()[path].key.versions for path in self.base]
        return (1,) in versions or default_version(build_config(self.base)) == 1

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
        model = named_model(self.answers.get("model", ""))
        found = replace(self.facts, model=model or self.facts.model)
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
def named_model(answer: str) -> ModelFacts | None:
    """Return the model that an answer names: a size such as 8b, a folder, or none.

    Args:
        answer: A checked answer.
    """
    if not answer:
        return None
    try:
        return sized_model(parse_count(answer))
    except ValueError:
        return read_model(hub_folder(answer) if is_hub_name(answer) else FilePath(answer))
