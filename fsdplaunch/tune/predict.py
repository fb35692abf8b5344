"""What `estimate` says of a candidate: bytes per rank, and whether it can fit at all.

The model is known from the first run that was measured. Where its activations are not, what that run needed beside
parameters, gradients and optimizer state is taken for them, for every candidate that checkpoints as it did.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fsdplaunch.byte_sizes import size_words
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import LaunchError
from fsdplaunch.estimate.families.parts import ActivationShape
from fsdplaunch.estimate.fsdp_units import split_into_units
from fsdplaunch.estimate.hf_config import describe
from fsdplaunch.estimate.memory import CONTEXT, MemoryCase
from fsdplaunch.estimate.model_sizes import TensorSize, model_sizes
from fsdplaunch.estimate.training_setup import TrainingSetup, training_setup
from fsdplaunch.probe.memory_plan import STATES
from fsdplaunch.tune.outcome import Outcome

_SLACK = 1.1
"""How far above the limit a prediction with activations must be before a candidate is not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What was found out about the model.

    Attributes:
        case: Its tensors, and its activations where they are known.
        optimizer: A key of STATES.
        batch: Rows and tokens per row; (1, 1) where no loader told.
        start: Bytes a rank has before anything is trained.
    """

    case: MemoryCase
    optimizer: str
    batch: tuple[int, int]
    start: int


@dataclass(slots=True, kw_only=True)
class Predictor:
    """Predicts memory.

    Attributes:
        world: Workers, all on this node.
        on_gpu: Whether they compute on GPUs.
        limit: Bytes that a rank may need; None where nothing limits it.
    """

    world: int
    on_gpu: bool
    limit: int | None
    _model: _Model | None = None
    _beside: dict[tuple[bool, int], int] = field(default_factory=dict)

    def learn(self, config: Config, outcome: Outcome) -> None:
        """Take what a measured run shows: the model, and what it needed beside what is calculated."""
        if self._model is None and outcome.model:
            self._model = _model_of(outcome.model, outcome.start)
        static = self._calculated(config)
        if static is not None:
            self._beside.setdefault(_kind(config), outcome.memory - static)

    def predict(self, config: Config) -> int | None:
        """Return the bytes that a rank of this configuration will need; None where that cannot be said."""
        static = self._calculated(config)
        if static is None or self._model is None:
            return None
        if self._model.case.shape is not None:
            # Activations are in the arithmetic: what is beside it, such as imports, is the same for all.
            return static + next(iter(self._beside.values()), self._model.start)
        beside = self._beside.get(_kind(config))
        return None if beside is None else max(0, static + beside)

    def refusal(self, config: Config) -> str:
        """Return why a configuration cannot fit, with the number; "" where it may."""
        blocks = self._model.case.sizes.depth if self._model is not None else 0
        if 0 < blocks < config.sharding.checkpoint_every:
            return f"the model has {blocks} block{'s' if blocks > 1 else ''}"
        static, predicted = self._calculated(config), self.predict(config)
        if self.limit is None or static is None or self._model is None:
            return ""
        extra = CONTEXT if self.on_gpu else 0
        least = static + extra + self._model.start if self._model.case.shape is None else 0
        likely = (predicted or 0) + extra
        if least <= self.limit and likely <= _SLACK * self.limit:
            return ""
        return f"needs {size_words(max(least, likely))} by estimate, {size_words(self.limit)} allowed"

    def units(self, config: Config) -> Any:
        """Return what the wrap policy makes of the model, equal where two make the same; None where not known."""
        policy = config.fsdp_config.fsdp_auto_wrap_policy
        if self._model is None or policy == "TRANSFORMER_BASED_WRAP":
            return None if self._model is None else policy
        setup = self._setup(config)
        if setup is None:
            return None
        return tuple(sorted(unit.name for unit in split_into_units(self._model.case.sizes, setup)[1]))

    def _calculated(self, config: Config) -> int | None:
        """Return what the arithmetic says of one rank, without what the process has at its start."""
        setup = self._setup(config)
        if setup is None or self._model is None:
            return None
        need = self._model.case.need
        total = need(setup).total
        if setup.checkpointing and (every := config.sharding.checkpoint_every) > 1:
            kept = need(replace(setup, checkpointing=False)).total  # the others keep their activations
            total += (kept - total) * (every - 1) // every
        return total

    def _setup(self, config: Config) -> TrainingSetup | None:
        if self._model is None:
            return None
        rows, length = self._model.batch
        try:
            return training_setup(
                config, world=self.world, per_node=self.world, batch_size=rows, length=length,
                optimizer=self._model.optimizer, on_gpu=self.on_gpu,
            )  # fmt: skip
        except LaunchError:
            return None


def _kind(config: Config) -> tuple[bool, int]:
    fsdp = config.fsdp_config
    return fsdp.fsdp_activation_checkpointing, config.sharding.checkpoint_every


def _model_of(found: Mapping[str, Any], start: int) -> _Model | None:
    """Return the model as a worker described it; None where its optimizer or its tensors are not known."""
    tensors = {name: TensorSize(tuple(shape), width) for name, (shape, width) in found["tensors"].items()}
    if found["optimizer"] not in STATES or not tensors:
        return None
    sizes = model_sizes(tensors, "the running script")
    batch = tuple(found["batch"] or (1, 1))
    shape = _activations(found["config"], sizes.parameters) if found["batch"] else None
    case = MemoryCase(sizes=sizes, shape=shape)
    return _Model(case=case, optimizer=found["optimizer"], batch=(batch[0], batch[1]), start=start)


def _activations(config: Mapping[str, Any] | None, parameters: int) -> ActivationShape | None:
    """Return what the activations of a transformers model depend on; None for others."""
    if config is None:
        return None
    try:
        described = describe(config, source="the running script")
    except LaunchError:
        return None
    return described.shape if described.sizes.parameters == parameters else None
