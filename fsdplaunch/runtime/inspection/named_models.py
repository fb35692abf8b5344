"""Find the models that an optimizer trains, and name their parameters as the script wrote them."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdplaunch.runtime.inspection.parameters import clean_name, named_parameters
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, full_tensor, local_tensor
from fsdplaunch.runtime.sharding.wrap import class_name

Known = tuple[str, nn.Parameter, bool]
"""A parameter's name, the parameter, and whether other workers hold more of it."""


def sum_of_squares(tensor: torch.Tensor) -> float:
    """Return the sum of squares of what this process holds of a tensor; 0 for a sparse one."""
    own = local_tensor(tensor)
    return float(own.double().square().sum().item()) if not own.is_sparse else 0.0


def squared_gradient(grad: torch.Tensor, param: nn.Parameter, shared: bool) -> tuple[float, bool]:
    """Return the sum of squares of what is here of a gradient, and whether other workers hold more of it.

    A script may have given a sharded parameter a gradient that each worker holds in full.

    Args:
        grad: Of the parameter.
        param: Whose it is.
        shared: Whether other workers hold more of the parameter.
    """
    return sum_of_squares(grad), _is_shard(grad) if isinstance(param, DTensor) else shared


class NamedModels:
    """The trained models of one process, in the order in which they were first trained. They are kept alive."""

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self._known: dict[int, Known] = {}

    def parameters_of(self, optimizer: Optimizer) -> list[Known]:
        """Return the parameters that an optimizer trains, with the names they have in their models."""
        return self._named([param for group in optimizer.param_groups for param in group["params"]])

    def parameters_with_gradients(self) -> list[Known]:
        """Return the parameters of all models that have a gradient now, with their names."""
        return self._named([each for root in _roots() for each in root.parameters() if each.grad is not None])

    def _named(self, params: list[nn.Parameter]) -> list[Known]:
        if any(id(param) not in self._known for param in params):
            self._find(params)
        return [self._known[id(param)] for param in params if id(param) in self._known]

    def squares(self) -> dict[str, tuple[float, bool]]:
        """Return, for each parameter, the sum of squares of what is here."""
        return {name: (sum_of_squares(param), shared) for name, param, shared in self._known.values()}

    def layers(self) -> list[str]:
        """Return the layers that compute something else with another batch: BatchNorm, dropout that is on."""
        found = []
        for root in self.roots:
            for name, module in root.named_modules():
                if _depends_on_batch(module):
                    found.append(f"{class_name(module)} {clean_name(name)}".strip())
        return found

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter in full, on the host. Collective in a sharded run."""
        for number, root in enumerate(self.roots):
            prefix = _prefix(root, number)
            if fsdp1_wrappers(root):
                yield from _full_of_wrapper(root, prefix)
                continue
            for name, param in named_parameters(root):
                value: Any = param.detach()
                yield prefix + name, full_tensor(value).cpu()

    def _find(self, params: list[nn.Parameter]) -> None:
        """Find the outermost modules that hold these parameters, and name them in the order of these.

        Not in the order in which they are found: models of one size are found in another order in each process.
        """
        left = {id(param) for param in params} - self._known.keys()
        places = {id(param): place for place, param in enumerate(params)}
        found: list[tuple[int, nn.Module]] = []
        for root in _roots():
            own = {id(param) for _, param in named_parameters(root)}
            if root not in self.roots and left & own:
                found.append((min(places[each] for each in left & own), root))
                left -= own
        for _, root in sorted(found, key=lambda each: each[0]):
            self._name(root)

    def _name(self, root: nn.Module) -> None:
        self.roots.append(root)
        prefix = _prefix(root, len(self.roots) - 1)
        shared = _sharded_by_wrapper(root)
        for name, param in named_parameters(root):
            self._known.setdefault(id(param), (prefix + name, param, shared or _is_shard(param)))


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _depends_on_batch(module: nn.Module) -> bool:
    """Return whether a layer computes something else when the batch is divided."""
    drops = isinstance(module, _DROPOUTS) and module.p > 0
    return module.training and (drops or isinstance(module, _BATCH_NORMS))


def _roots() -> list[nn.Module]:
    """Return the modules that are in no other one, those with most parameters first; DDP's content for DDP."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inside = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inside]
    bare: list[nn.Module] = [each.module if isinstance(each, DistributedDataParallel) else each for each in roots]
    return sorted(bare, key=lambda root: -sum(1 for _ in root.parameters()))


def _prefix(root: nn.Module, number: int) -> str:
    """Return what stands before the names of the second model and those after it."""
    return f"{class_name(root)}{number + 1}." if number else ""


def _is_shard(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(isinstance(each, Replicate) for each in tensor.placements)


def _sharded_by_wrapper(root: nn.Module) -> bool:
    """Return whether FSDP1 holds shards of a model."""
    return any(each.sharding_strategy is not ShardingStrategy.NO_SHARD for each in fsdp1_wrappers(root))


def _full_of_wrapper(root: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    from fsdplaunch.runtime.state_dict.full_state import full_shapes, full_state

    state = full_state(root, "check --compare")
    yield from ((prefix + name, state[name]) for name in full_shapes(root) if name in state)
