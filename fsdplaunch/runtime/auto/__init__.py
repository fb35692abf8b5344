"""What the hooks of one worker share: who shards, the models found, random streams, how far training is."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
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
from fsdplaunch.runtime.inspection import unwrapped
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.random_numbers import seed_by_chance
from fsdplaunch.runtime.rank import configured_data_ranks
from fsdplaunch.runtime.sharding.wrap import runs
from fsdplaunch.runtime.torch_internals.modules import is_built, own_children, own_parameters
from fsdplaunch.runtime.torch_internals.tensors import tensors_held

_LOOKED_AT = 2
"""Backward passes at which ranks compare their rows: once training draws for each rank, the second has others."""


@dataclass(slots=True)
class Progress:
    """How far one worker's training is, and what ranks compute in it."""

    backwards: int = 0  # backward passes that have begun
    passes: int = 0  # passes in training since the last of them
    divided: bool = False  # a loader gave this rank its share of something
    complete: bool = False  # the loader that was read last gave all ranks the same rows, to evaluate by
    compared: bool = False  # ranks have compared their rows
    fingerprint: float | None = None  # of what the last pass was given; None before the first, and once compared

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
        done = self.compared or self.divided or self.fingerprint is None or not self.passes
        if done or self.backwards + 1 < _LOOKED_AT:
            return
        self.compared = True
        own, self.fingerprint = self.fingerprint, None
        extremes = torch.tensor([own, -own], dtype=torch.float64, device=device)  # type: ignore[operator]
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
        """Return the outermost modules above that are called, which lists are not, without compile's wrappers."""
        parents: dict[int, list[nn.Module]] = {}
        for module in self.alive():
            if not isinstance(module, DistributedDataParallel):  # stands around a model, and is none
                for _, child in own_children(module):
                    parents.setdefault(id(child), []).append(module)
        tops: dict[int, nn.Module] = {}
        for module in modules:
            level, seen, best = [module], {id(module)}, module
            while level:
                level = [p for m in level for p in parents.get(id(m), ()) if id(p) not in seen]
                seen.update(id(p) for p in level)
                best = next((p for p in level if runs(p)), best)
            tops[id(unwrapped(best))] = unwrapped(best)
        return list(tops.values())


class HookContext:
    """One worker's run of one script: nothing is decided at its start, nothing found."""

    def __init__(self, config: Config, device: torch.device, *, rank: int, size: int) -> None:
        self.config, self.device, self.rank, self.size = config, device, rank, size
        self.keeps_batch = config.launch.keep_global_batch  # the script runs on the global batch on every rank
        # This worker's number among those that read different data; fewer, where layers are split.
        self.data = configured_data_ranks(config, rank=rank, size=size)
        self.ownership = Ownership(config)
        self.streams = RngStreams(rank=self.data.rank, kept=self.keeps_batch, scripts=size == 1)
        if rank:
            self.ownership.leave_draws = lambda: seed_by_chance(self.streams.seeds)
        self.module_registry, self.position, self.batches = ModuleRegistry(), Position(), Progress()
        # The models sharded for the script, with the line where, and what checks that they have no new parameter.
        self.models: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.complete: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()
        # The numbers of these and of those that others have sharded, the same on all ranks.
        self.numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that train the shards
        self._built: list[weakref.ref[Optimizer]] = []  # all of them, in order
        self.own_names: set[torch.device] = set()  # GPUs that the script names, and that are read as this worker's
        self.when_sharded: list[Callable[[], None]] = []  # to be called when the first model was sharded
        self.printed: set[str] = set()  # messages that are not repeated
        self.undo = ExitStack()  # takes away at the end what hooks have replaced later than at the start

    def say_once(self, message: str, key: str = "") -> None:
        """Print a message unless it, or another one with the same key, was printed before."""
        if (key or message) not in self.printed:
            self.printed.add(key or message)
            messages.say(message)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Remember an optimizer, weakly."""
        self._built.append(weakref.ref(optimizer))

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
        """Return the optimizers of shards that live, with numbers that are the same on all ranks."""
        optimizers = [ref() for ref in self._built]
        numbered = [each for each in optimizers if each is None or trains_shards(each)]
        return [(number, each) for number, each in enumerate(numbered) if each is not None]

    def built_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that are alive, in the order they were built, which is the same on all ranks."""
        return [optimizer for ref in self._built if (optimizer := ref()) is not None]

    def learning_rates(self) -> list[float]:
        """Return the learning rates of the optimizers of shards."""
        groups = [group for _, optimizer in self.numbered_optimizers() for group in optimizer.param_groups]
        return [float(group["lr"]) for group in groups if "lr" in group]

    def evaluating(self) -> bool:
        """Return whether the script computes without training: no gradients, or no model in training mode."""
        return not torch.is_grad_enabled() or not any(model.training for model in list(self.models))
