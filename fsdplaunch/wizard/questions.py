"""What a question is, and all of them in their order: where a run takes place, then what trains and how.

Data and pure functions; `wizard.conversation` asks. A question that only decides one key comes from the schema:
its words, what it may hold, how it is read. The others say here what they need beyond that.
"""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.resolve import CPU_WORKERS, strategy_named, uses_xla
from fsdplaunch.config.schema.config import Config, KeyPath, build_config, keys_by_path, value_at
from fsdplaunch.config.schema.kinds import ENDPOINT, NAMES, join_endpoint
from fsdplaunch.display_text import GIB
from fsdplaunch.errors import LaunchError
from fsdplaunch.features import ESTIMATE, feature
from fsdplaunch.launch.plan import DEFAULT_PORT
from fsdplaunch.probe.model_files import parse_count
from fsdplaunch.wizard.state import WizardState, named_model

KEEP = "keep"  # the answer that leaves a question's keys as the existing file says them
TYPE_IT = "..."  # the choice that opens a line to type an answer in


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to choose."""

    value: str  # the answer as a flag gives it
    title: str  # the answer in words
    consequence: str = ""  # what it costs or brings here, in a few words; shown beside the title
    detail: str = ""  # more about it; shown below the list while the cursor is on it
    disabled: str | None = None  # why it cannot be chosen here, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question. What it does not say itself comes from the schema of its first key."""

    name: str  # of the answer, and of the flag: `--name`
    help: str  # one sentence for the flag's help and for `?`
    metavar: str  # what the flag takes, for its help
    keys: tuple[KeyPath, ...]  # the configuration keys it decides; no other part of the wizard writes them
    text: str = ""  # what is asked
    write: Callable[[str, WizardState], Mapping[KeyPath, Any]] | None = None  # the keys' values for an answer
    # The answer that a configuration holds; None when no answer says it.
    read: Callable[[Config, WizardState], str | None] | None = None
    # Text as typed -> canonical answer; ValueError says what is wrong. None: only choices are answers.
    check: Callable[[str, WizardState], str] | None = None
    # What speaks against an answer that is possible; a person is then asked again.
    doubt: Callable[[str, WizardState], str | None] = lambda answer, state: None  # noqa: ARG005
    # Whether the answer matters.
    applies: Callable[[WizardState], bool] = lambda state: True  # noqa: ARG005
    # Whether it is asked when it matters; otherwise the suggestion is taken.
    asked: Callable[[WizardState], bool] = lambda state: True  # noqa: ARG005
    # What can be chosen; none for a line of text.
    choices: Callable[[WizardState], tuple[Choice, ...]] = lambda state: ()  # noqa: ARG005
    # Shown behind a line of text.
    remark: Callable[[WizardState], str] = lambda state: ""  # noqa: ARG005
    # Whether the suggestion may be taken without anybody having seen it.
    certain: Callable[[WizardState], bool] = lambda state: True  # noqa: ARG005

    @property
    def flag(self) -> str:
        """Return the option that answers it."""
        return f"--{self.name}"

    @property
    def words(self) -> str:
        """Return what is asked."""
        return self.text or keys_by_path()[self.keys[0]].key.question or ""

    def values(self, answer: str, state: WizardState) -> Mapping[KeyPath, Any]:
        """Return the keys' values for an answer."""
        if self.write is not None:
            return self.write(answer, state)
        path = self.keys[0]
        return {path: keys_by_path()[path].key.kind.parse(answer)}

    def answer_in(self, config: Config, state: WizardState) -> str | None:
        """Return the answer that a configuration holds; None when no answer says it."""
        if self.read is not None:
            return self.read(config, state)
        return keys_by_path()[self.keys[0]].key.kind.write(value_at(config, self.keys[0]))

    def accept(self, text: str, state: WizardState) -> str:
        """Return the canonical answer of a text that was typed, chosen or given by flag.

        Raises:
            ValueError: It is not an answer after those to earlier questions; the text says why.
        """
        text = text.strip()
        if text == KEEP and self.can_keep(state):
            return KEEP
        choices = self.choices(state)
        for choice in choices:
            if choice.value == text.lower() and choice.value != TYPE_IT:
                if choice.disabled:
                    msg = f"{choice.value} is not possible: {choice.disabled}"
                    raise ValueError(msg)
                return choice.value
        if self.check is None:
            msg = f"must be one of {', '.join(choice.value for choice in choices)}, got {text!r}"
            raise ValueError(msg)
        try:
            return self.check(text, state)
        except LaunchError as error:
            raise ValueError(error.message) from None

    def is_answer(self, text: str | None, state: WizardState) -> bool:
        """Return whether a text answers it, given the answers to earlier questions."""
        try:
            return text is not None and self.accept(text, state) is not None
        except ValueError:
            return False

    def can_keep(self, state: WizardState) -> bool:
        """Return whether the edited file says something here that no answer can say on this machine."""
        in_file = any(path in state.base for path in self.keys)
        return in_file and not self.is_answer(self.answer_in(build_config(state.base), state), state)

    def proposed(self, state: WizardState) -> str:
        """Return the answer to offer first: the file's when one is edited, else the suggestion's."""
        offers = [self.answer_in(build_config(state.base), state)] if state.editing else []
        if state.editing and self.can_keep(state):
            offers.insert(0, KEEP)
        offers += [self.answer_in(state.suggestion.config, state)]
        offers += [choice.value for choice in self.choices(state) if not choice.disabled]
        return next((offer for offer in offers if offer is not None and self.is_answer(offer, state)), "")


Values = Mapping[KeyPath, Any]

_USE_CPU: KeyPath = ("use_cpu",)
_XLA: KeyPath = ("fsdp_config", "xla")
_IP: KeyPath = ("main_process_ip",)
_PORT: KeyPath = ("main_process_port",)
_PROCESSES: KeyPath = ("num_processes",)
_WORKERS: KeyPath = ("launch", "workers_per_node")


def _where_choices(state: WizardState) -> tuple[Choice, ...]:
    gpus, job = len(state.facts.hardware.gpus), state.facts.cluster
    seen = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU was found"
    in_job = f"job {job.job_id}" if job.kind == "slurm" else "inside an allocation"
    over_gloo = "The same sharding, checkpoints and merging, over gloo."
    pods = "Hosts of a pod find each other by its variables; without a TPU it computes on the CPU."
    return (
        Choice("here", "On this machine's GPUs", seen),
        Choice("machines", "On several nodes", detail="Each one runs the same launch command."),
        Choice("slurm", "In a SLURM job", in_job, "Start it with srun."),
        Choice("cpu", "On this machine's CPUs", "to try things out", over_gloo),
        Choice("tpu", "On TPUs", "with PyTorch/XLA", pods),
    )


def _read_where(config: Config, state: WizardState) -> str:
    if uses_xla(config):
        return "tpu"
    if config.use_cpu:
        return "cpu"
    in_slurm = state.facts.cluster.kind == "slurm"
    if config.num_machines > 1 or (in_slurm and not state.editing):
        return "slurm" if in_slurm else "machines"
    return "here"


WHERE = Question(
    name="where",
    text="Where will this run?",
    help="Where the run will be: here, machines (several, reached by address), slurm, cpu, or tpu (PyTorch/XLA).",
    metavar="here|machines|slurm|cpu|tpu",
    keys=(_USE_CPU, _XLA),
    write=lambda answer, _: {"cpu": {_USE_CPU: True}, "tpu": {_XLA: True}}.get(answer, {}),
    read=_read_where,
    choices=_where_choices,
    certain=lambda state: state.facts.gpus_per_node > 0 or state.facts.on_tpus,
)


def _whole_number(text: str, *, least: int, more: str = "") -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 7) or int(text) < least:  # noqa: PLR2004
        msg = f"must be a whole number from {least}{more}, got {text!r}"
        raise ValueError(msg)
    return int(text)


def _fewest_nodes(state: WizardState) -> int:
    return 1 if state.answers.get("where") == "slurm" else 2


NODES = Question(
    name="nodes",
    help="Nodes that take part.",
    metavar="N",
    keys=(("num_machines",),),
    read=lambda config, state: str(max(config.num_machines, _fewest_nodes(state))),
    check=lambda text, state: str(_whole_number(text, least=_fewest_nodes(state))),
    applies=lambda state: state.answers.get("where") in ("machines", "slurm"),
    asked=lambda state: state.answers.get("where") != "slurm" or state.facts.cluster.num_nodes is None,
    certain=lambda state: state.editing or state.facts.cluster.num_nodes is not None,
)


def _check_rendezvous(text: str, _: WizardState) -> str:
    """Read HOST, HOST:PORT or [IPV6]:PORT; without a port it is torchrun's usual 29500."""
    has_port = ":" in text and not text.endswith("]")
    try:
        endpoint = str(ENDPOINT.parse(text if has_port else f"{text}:{DEFAULT_PORT}"))
    except ValueError:
        endpoint = ":0"
    if endpoint.endswith(":0"):
        msg = f"must be HOST:PORT, got {text!r}"
        raise ValueError(msg)
    return endpoint


def _write_rendezvous(answer: str, _: WizardState) -> Values:
    host, _colon, port = answer.rpartition(":")
    return {_IP: host.removeprefix("[").removesuffix("]"), _PORT: int(port)}


RENDEZVOUS = Question(
    name="rendezvous",
    text="Where do the nodes meet? Address of node 0",
    help="HOST:PORT of node 0, as the others reach it.",
    metavar="HOST:PORT",
    keys=(_IP, _PORT, ("launch", "rendezvous_endpoint")),
    write=_write_rendezvous,
    read=lambda config, _: (
        config.launch.rendezvous_endpoint
        or join_endpoint(config.main_process_ip or socket.gethostname(), config.main_process_port or DEFAULT_PORT)
    ),
    check=_check_rendezvous,
    applies=lambda state: state.answers.get("where") == "machines",
    certain=lambda state: state.editing,
)


def _workers_remark(state: WizardState) -> str:
    gpus = len(state.facts.hardware.gpus)
    if state.answers.get("where") == "cpu":
        return f"({state.facts.hardware.cpu_count} processors here)"
    return f"({gpus} GPUs here; auto: one per GPU)" if gpus else "(auto: one per GPU)"


def _check_workers(text: str, state: WizardState) -> str:
    if text.lower() == "auto":
        return "auto"
    number = _whole_number(text, least=1, more=", or auto")
    gpus = len(state.facts.hardware.gpus)
    if state.answers.get("where") == "here" and number > gpus > 0:
        msg = f"this machine has {gpus} visible GPUs, got {number}"
        raise ValueError(msg)
    return str(number)


def _doubt_workers(answer: str, state: WizardState) -> str | None:
    processors = state.facts.hardware.cpu_count
    if state.answers.get("where") in ("here", "cpu") and answer.isdecimal() and int(answer) > processors:
        return f"{answer} workers share {processors} processors here"
    return None


def _read_workers(config: Config, state: WizardState) -> str | None:
    if config.launch.workers_per_node is not None:
        return str(config.launch.workers_per_node)
    if config.num_processes == "auto":
        return "auto"
    per_node, rest = divmod(config.num_processes, config.num_machines)
    if state.answers.get("where") == "cpu" and not config.use_cpu:
        return str(CPU_WORKERS)
    return str(per_node) if rest == 0 else None


WORKERS = Question(
    name="workers-per-node",
    help="Worker processes on each node: a number, or auto for one per GPU.",
    metavar="N|auto",
    keys=(_WORKERS, _PROCESSES),
    # A number as accelerate has it, over all nodes; only auto needs a key of our own.
    write=lambda answer, state: (
        {_WORKERS: "auto"} if answer == "auto" else {_PROCESSES: int(answer) * state.num_nodes}
    ),
    read=_read_workers,
    check=_check_workers,
    doubt=_doubt_workers,
    applies=lambda state: not state.on_tpus,  # PyTorch/XLA has one process per chip or per host
    asked=lambda state: state.facts.gpus_per_node != 1 or state.answers.get("where") != "here",
    remark=_workers_remark,
)


def _check_model(text: str, _: WizardState) -> str:
    if not text or text.lower() == "none":
        return ""
    text = str(FilePath(text).expanduser()) if text.startswith("~") else text
    named_model(text)  # an error says what is wrong with it
    return text


MODEL = Question(
    name="model",
    text="Model folder, or its size",
    help="Folder of the model, its hub name, or its size such as 8b; only used for the estimates shown.",
    metavar="FOLDER|ORG/MODEL|SIZE",
    keys=(),
    write=lambda *_: {},
    read=lambda *_: "",
    check=_check_model,
    remark=lambda _: "(a size such as 8b will do, none skips)",
)

_STRATEGY: KeyPath = ("fsdp_config", "fsdp_sharding_strategy")
_RESHARD: KeyPath = ("fsdp_config", "fsdp_reshard_after_forward")
_OFFLOAD: KeyPath = ("fsdp_config", "fsdp_offload_params")
_RECOMPUTE: KeyPath = ("fsdp_config", "fsdp_activation_checkpointing")
_REPLICAS: KeyPath = ("parallelism_config", "parallelism_config_dp_replicate_size")
_SHARDS: KeyPath = ("parallelism_config", "parallelism_config_dp_shard_size")
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


def memory_words(goal: str, state: WizardState) -> tuple[str, str | None]:
    """Return what each GPU would need under a goal, in words, and why it does not fit, or None if it does."""
    model, workers, limit = state.run_facts.model, state.workers, state.run_facts.hardware.gpu_memory_bytes
    if state.on_tpus or model is None or workers is None:
        return "", None  # the estimate is of GPUs, and needs these numbers
    on_cpu = state.answers.get("where") == "cpu"
    need = feature(ESTIMATE).before_activations(
        model,
        ranks=workers if goal == "hybrid" else workers * state.num_nodes,
        mixed=(state.answers.get("precision") or state.suggestion.config.mixed_precision) != "no",
        keeps=goal == "fastest",
        offload=goal == "biggest" and not on_cpu,
        on_gpu=not on_cpu,
    )
    if on_cpu:
        return f"{need.gpu / GIB:.1f} GiB of memory per worker", None
    host = f" and {need.host / GIB:.1f} of host memory" if need.host else ""
    text = f"{need.gpu / GIB:.1f}" + (f" of {limit / GIB:.0f}" if limit else "") + f" GiB per GPU{host}"
    return text, f"needs {text}" if limit is not None and need.gpu > limit else None


def _possible_goals(state: WizardState) -> list[str]:
    if state.on_tpus:
        return ["balanced", "fastest"]
    return [goal for goal in _GOALS if goal != "hybrid" or state.num_nodes > 1]


def _goal_choices(state: WizardState) -> tuple[Choice, ...]:
    choices = []
    for goal in _possible_goals(state):
        title, detail = _GOALS[goal]
        need, too_big = memory_words(goal, state)
        # The biggest stays possible whatever the numbers say: nothing else would be left to choose.
        disabled = too_big if goal != "biggest" else None
        choices.append(Choice(goal, title, need, detail, disabled))
    return tuple(choices)


def _write_goal(answer: str, state: WizardState) -> Values:
    new = state.version != 1
    if answer == "fastest":
        return {_STRATEGY: "SHARD_GRAD_OP"} | ({_RESHARD: False} if new else {})
    if answer == "hybrid":
        sizes = {_REPLICAS: state.num_nodes, _SHARDS: state.workers} if new and state.workers is not None else {}
        return {_STRATEGY: "HYBRID_SHARD", **sizes}
    return {_STRATEGY: "FULL_SHARD"} | ({_OFFLOAD: True, _RECOMPUTE: True} if answer == "biggest" else {})


def _read_goal(config: Config, state: WizardState) -> str | None:
    """Return the goal whose keys these are, exactly; anything finer is not a goal."""
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
    help="What matters most: balanced, fastest, hybrid (a replica per node) or biggest (host memory helps).",
    metavar="balanced|fastest|hybrid|biggest",
    keys=(_STRATEGY, _RESHARD, _OFFLOAD, _REPLICAS, _SHARDS),
    write=_write_goal,
    read=_read_goal,
    asked=lambda state: len(_possible_goals(state)) > 1,
    choices=_goal_choices,
)


def _precision_choices(state: WizardState) -> tuple[Choice, ...]:
    hardware, on_cpu, on_tpus = state.run_facts.hardware, state.answers.get("where") == "cpu", state.on_tpus
    usual = "every GPU here supports it" if hardware.all_have_bf16 else "half the traffic"
    usual = "slow on most CPUs" if on_cpu else "TPUs compute in it" if on_tpus else usual
    return (
        Choice(
            "bf16",
            "bf16",
            usual,
            "Parameters and optimizer state are kept in fp32; blocks are gathered and computed in bf16.",
            "a GPU here does not support it" if hardware.gpus and not hardware.all_have_bf16 else None,
        ),
        Choice(
            "fp16",
            "fp16",
            "the script must scale its loss",
            "Its narrow range lets small gradients vanish unless the loss is scaled.",
            f"{'TPUs' if on_tpus else 'CPUs'} do not train in it" if on_cpu or on_tpus else None,
        ),
        Choice("no", "no", "the model's own dtype; nothing is cast"),
    )


PRECISION = Question(
    name="precision",
    help="Dtype of forward and backward: bf16, fp16 or no.",
    metavar="bf16|fp16|no",
    keys=(("mixed_precision",),),
    choices=_precision_choices,
)

_POLICY: KeyPath = ("fsdp_config", "fsdp_auto_wrap_policy")
_CLASSES: KeyPath = ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
_MIN_SIZE: KeyPath = ("fsdp_config", "fsdp_min_num_params")


def _wrap_choices(_: WizardState) -> tuple[Choice, ...]:
    own = "The classes in the model's own _no_split_modules, else the blocks it repeats."
    whole = "Everything is gathered at once, and stays gathered from forward to backward."
    return (
        Choice("auto", "Each repeated block", detail=own),
        Choice(TYPE_IT, "Classes or a size that I type", "such as LlamaDecoderLayer"),
        Choice("none", "The whole model", "for small models", whole),
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


def _write_wrap(answer: str, _: WizardState) -> Values:
    if answer == "none":
        return {_POLICY: "NO_WRAP"}
    if answer.startswith("size:"):
        return {_POLICY: "SIZE_BASED_WRAP", _MIN_SIZE: int(answer.removeprefix("size:"))}
    classes = {} if answer == "auto" else {_CLASSES: NAMES.parse(answer)}
    return {_POLICY: "TRANSFORMER_BASED_WRAP", **classes}


def _read_wrap(config: Config, _: WizardState) -> str:
    fsdp = config.fsdp_config
    if fsdp.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        return ",".join(fsdp.fsdp_transformer_layer_cls_to_wrap) or "auto"
    return "none" if fsdp.fsdp_auto_wrap_policy == "NO_WRAP" else f"size:{fsdp.fsdp_min_num_params}"


WRAP = Question(
    name="wrap",
    help="What is gathered as one unit: auto, class names, size:N, or none.",
    metavar="auto|CLASS,...|size:N|none",
    keys=(_POLICY, _CLASSES, _MIN_SIZE),
    write=_write_wrap,
    read=_read_wrap,
    check=_check_wrap,
    choices=_wrap_choices,
)


QUESTIONS = (WHERE, NODES, RENDEZVOUS, WORKERS, MODEL, GOAL, PRECISION, WRAP)
"""Everything that may be asked, besides one for all further keys."""
