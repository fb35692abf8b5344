"""What the hooks of one worker share: who shards, the models found, random streams, how far training is."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdplaunch.config.schema.config import Config
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.batch.streams import RngStreams
from fsdplaunch.runtime.auto.model.who_shards import Ownership
from fsdplaunch.runtime.auto.rank0.position import Position, trains_shards
from fsdplaunch.runtime.inspection.parameters import unwrapped
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.random_numbers import seed_by_chance
from fsdplaunch.runtime.rank import DataRanks, configured_data_ranks
from fsdplaunch.runtime.sharding.wrap import runs
from fsdplaunch.runtime.torch_internals.modules import is_built, own_children, own_parameters
from fsdplaunch.runtime.torch_internals.tensors import tensors_held

_LOOKED_AT = 2
"""Backward passes at which ranks compare their rows: once training draws for each rank, the second has others."""


@dataclass(slots=True)
class Progress:
    """One worker's.

    Attributes:
        backwards: Backward passes that have begun.
        passes: Passes in training since the last of them.
        divided: Whether a loader gave this rank its share of something.
        complete: Whether the loader that was read last gave all ranks the same rows, to evaluate by.
        compared: Whether ranks have compared their rows.
        fingerprint: A number made of what the last pass was given; None before the first, and once compared.
    """

    backwards: int = 0
    passes: int = 0
    divided: bool = False
    complete: bool = False
    compared: bool = False
    fingerprint: float | None = None

    def enter(self, given: Iterable[Any]) -> None:
        """Note what a pass in training with gradients is given."""
        self.passes += 1
        if self.backwards < _LOOKED_AT and not self.divided:
            self.fingerprint = sum(digest(tensor) for tensor in tensors_held(tuple(given)))

    def leave(self) -> None:
        """Note that a backward begins, which the passes so far belong to."""
        self.passes = 0
        self.backwards += 1

    def compare_rows(self, device: torch.device, *, ranked: bool) -> None:
        """Warn before a backward where all ranks compute the same rows. Collective at the second one."""
        if self.compared or self.divided or self.fingerprint is None or not self.passes:
            return
        if self.backwards + 1 < _LOOKED_AT:
            return
        self.compared = True
        own, self.fingerprint = self.fingerprint, None
        extremes = torch.tensor([own, -own], dtype=torch.float64, device=device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if extremes[0] == -extremes[1]:
            why = "the script has no DistributedSampler" if ranked else "no DataLoader divides them"
            advice = "" if ranked else ": as slow as one process; --keep-global-batch divides the model's passes"
            line, ranks = script_line(), dist.get_world_size()
            messages.say(f"{line}: all {ranks} ranks compute the same rows, because {why}{advice}")


def digest(tensor: torch.Tensor) -> float:
    """Return a number that nearly any other content changes: each place has a weight of its own."""
    if tensor.is_meta or not tensor.numel():
        return 0.0
    if tensor.is_nested or tensor.layout is not torch.strided:
        return float(tensor.detach().double().sum())
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.detach().flatten()
    flat = flat[:: max(len(flat) // 4096, 1)].double().nan_to_num()
    return float((flat * torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)).sum())


class ModuleRegistry:
    """The modules that were made and are alive, held weakly, to find the model that a parameter belongs to."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[nn.Module]] = {}

    def note(self, module: nn.Module) -> None:
        """Remember a module, weakly."""
        key = id(module)
        self._refs[key] = weakref.ref(module, lambda _: self._refs.pop(key, None))

    def alive(self) -> list[nn.Module]:
        """Return all modules."""
        found = (ref() for ref in list(self._refs.values()))
        return [module for module in found if module is not None and is_built(module)]

    def is_root(self, module: nn.Module) -> bool:
        """Return whether no module that can be called holds this one, directly or further up."""
        return module in self._tops([module])

    def roots_of(self, params: Iterable[Any]) -> tuple[list[nn.Module], list[Any]]:
        """Return the models that hold these parameters, and the parameters that no module holds."""
        wanted = {id(param): param for param in params}
        held = {module: {id(param) for _, param in own_parameters(module)} for module in self.alive()}
        holders = [module for module, own in held.items() if own & wanted.keys()]
        found = {key for module in holders for key in held[module]}
        return self._tops(holders), [param for key, param in wanted.items() if key not in found]

    def _tops(self, modules: list[nn.Module]) -> list[nn.Module]:
        """Return the outermost callable modules above the given ones, without torch.compile's wrappers."""
        parents: dict[int, list[nn.Module]] = {}
        for module in self.alive():
            if not isinstance(module, DistributedDataParallel):  # stands around a model, and is none
                for _, child in own_children(module):
                    parents.setdefault(id(child), []).append(module)
        tops = (unwrapped(_highest(module, parents)) for module in modules)
        return list({id(top): top for top in tops}.values())


def _highest(module: nn.Module, parents: dict[int, list[nn.Module]]) -> nn.Module:
    """Return the last callable module on the way up: lists and plain holders of models are not models."""
    level, seen, best = [module], {id(module)}, module
    while level:
        above = [p for m in level for p in parents.get(id(m), ()) if id(p) not in seen]
        seen.update(id(p) for p in above)
        best = next((p for p in above if runs(p)), best)
        level = above
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class HookContext:
    """One worker's run of one script.

    Attributes:
        config: As launched.
        device: This worker's own.
        rank: Among all workers.
        size: How many workers there are.
        data: This worker's number among those that read different data; fewer, where layers are split.
        ownership: Who shards.
        module_registry: The modules that exist.
        streams: The random generators.
        models: The models sharded for the script, and the line where.
        when_sharded: What to call when the first model was sharded.
        complete: For each of them, what to call to check that no parameter was added since.
        printed: The messages that were printed and are not repeated.
        position: Where the script is.
        numbers: The numbers of these models and of those that accelerate has sharded, the same on all ranks.
        _next: Gives the next of them.
        _optimizers: Those that were built, in order.
        optimizers: Those that train the shards.
        batches: How far training is, and what passes are given.
        undo: Takes away at the end what hooks have replaced later than at the start.
    """

    config: Config
    device: torch.device
    rank: int
    size: int
    data: DataRanks
    ownership: Ownership
    module_registry: ModuleRegistry
    streams: RngStreams
    models: "weakref.WeakKeyDictionary[nn.Module, str]" = field(default_factory=weakref.WeakKeyDictionary)
    when_sharded: list[Callable[[], None]] = field(default_factory=list)
    complete: "weakref.WeakKeyDictionary[nn.Module, Callable[[], None]]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    printed: set[str] = field(default_factory=set)
    position: Position = field(default_factory=Position)
    numbers: "weakref.WeakKeyDictionary[nn.Module, int]" = field(default_factory=weakref.WeakKeyDictionary)
    _next: "itertools.count[int]" = field(default_factory=itertools.count)
    _optimizers: "list[weakref.ref[Optimizer]]" = field(default_factory=list)
    optimizers: "weakref.WeakSet[Optimizer]" = field(default_factory=weakref.WeakSet)
    batches: Progress = field(default_factory=Progress)
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def keeps_batch(self) -> bool:
        """Return whether every rank runs the script on the global batch, with the model's passes divided."""
        return self.config.launch.keep_global_batch

    def say_once(self, message: str, key: str = "") -> None:
        """Print a message unless it, or another one with the same key, was printed before."""
        if (key or message) not in self.printed:
            self.printed.add(key or message)
            messages.say(message)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Remember an optimizer, weakly."""
        self._optimizers.append(weakref.ref(optimizer))

    def note_model(self, model: nn.Module, line: str) -> None:
        """Remember a model that was sharded, weakly, and the script's line where."""
        self.models[model] = line
        self.number_model(model)
        while self.when_sharded:
            self.when_sharded.pop()()

    def number_model(self, model: nn.Module) -> None:
        """Give a model a number, by which ranks ask each other for its shards; in the same order on all ranks."""
        self.numbers[model] = next(self._next)
        self.position.watch(model)

    def numbered_optimizers(self) -> list[tuple[int, Optimizer]]:
        """Return the optimizers of shards that are alive, with numbers that are the same on all ranks.

        One of no shards has no number: it may be one rank's own.
        """
        optimizers = [ref() for ref in self._optimizers]
        numbered = [optimizer for optimizer in optimizers if optimizer is None or trains_shards(optimizer)]
        return [(number, optimizer) for number, optimizer in enumerate(numbered) if optimizer is not None]

    def built_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that are alive, in the order they were built, which is the same on all ranks."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def learning_rates(self) -> list[float]:
        """Return the learning rates of the optimizers of shards."""
        groups = [group for _, optimizer in self.numbered_optimizers() for group in optimizer.param_groups]
        return [float(group["lr"]) for group in groups if "lr" in group]

    def evaluating(self) -> bool:
        """Return whether the script computes without training: no gradients, or no model in training mode."""
        return not torch.is_grad_enabled() or not any(model.training for model in list(self.models))


def context_of(config: Config, device: torch.device, *, rank: int, size: int) -> HookContext:
    """Make a worker's context at its start: nothing decided, nothing found."""
    data = configured_data_ranks(config, rank=rank, size=size)
    streams = RngStreams(rank=data.rank, kept=config.launch.keep_global_batch, scripts=size == 1)
    ownership = Ownership(config)
    if rank:
        ownership.leave_draws = lambda: seed_by_chance(streams.seeds)
    return HookContext(
        config=config,
        device=device,
        rank=rank,
        size=size,
        data=data,
        ownership=ownership,
        module_registry=ModuleRegistry(),
        streams=streams,
    )
