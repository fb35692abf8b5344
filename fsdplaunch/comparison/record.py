"""Record what a script computes in each optimizer step, without a change of the script.

The same recorder runs in a plain process and in every worker. Nothing here is collective: each process writes down
its own part, and the launcher puts the parts together.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdplaunch.config.environment import COMPARE_CHANGED, COMPARE_DIR, REHEARSAL_STEPS
from fsdplaunch.run_dir import COMPARED_CHANGED, COMPARED_PLAIN, write_json
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.check_run import stop_after
from fsdplaunch.runtime.compat.accelerate import shuffle_alike_of_accelerate
from fsdplaunch.runtime.inspection import clean_name, living_modules, named_parameters
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, full_tensor, local_tensor
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.random_numbers import SEED, random_digest, seed_all, seeding_from
from fsdplaunch.runtime.rank import rank, rank_variable
from fsdplaunch.runtime.script import parse_target, run_target
from fsdplaunch.runtime.sharding.wrap import class_name
from fsdplaunch.runtime.torch_internals.modules import CALL_METHOD
from fsdplaunch.runtime.torch_internals.tensors import is_of_transform

Known = tuple[str, nn.Parameter, bool]
"""A parameter's name, the parameter, and whether other workers hold more of it."""


def _sum_of_squares(tensor: torch.Tensor) -> float:
    """Return the sum of squares of what this process holds of a tensor; 0 for a sparse one."""
    own = local_tensor(tensor)
    return float(own.double().square().sum().item()) if not own.is_sparse else 0.0


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class NamedModels:
    """The trained models of one process, in the order in which they were first trained. They are kept alive."""

    def __init__(self) -> None:
        self.roots: dict[nn.Module, str] = {}
        self._known: dict[int, Known] = {}

    def named(self, params: Iterable[nn.Parameter]) -> list[Known]:
        """Return parameters with the names they have in their models."""
        params = list(params)
        if any(id(param) not in self._known for param in params):
            self._find(params)
        return [self._known[id(param)] for param in params if id(param) in self._known]

    def squares(self) -> dict[str, tuple[float, bool]]:
        """Return, for each parameter, the sum of squares of what is here."""
        return {name: (_sum_of_squares(param), shared) for name, param, shared in self._known.values()}

    def layers(self) -> list[str]:
        """Return the layers that compute something else when the batch is divided: BatchNorm, active dropout."""
        modules = [each for root in self.roots for each in root.named_modules() if each[1].training]
        return [
            f"{class_name(module)} {clean_name(name)}".strip()
            for name, module in modules
            if isinstance(module, _BATCH_NORMS) or (isinstance(module, _DROPOUTS) and module.p > 0)
        ]

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter in full, on the host. Collective in a sharded run."""
        for root, prefix in self.roots.items():
            if fsdp1_wrappers(root):
                from fsdplaunch.runtime.state_dict.full_state import full_shapes, full_state

                state = full_state(root, "check --compare")
                yield from ((prefix + name, state[name]) for name in full_shapes(root) if name in state)
                continue
            for name, param in named_parameters(root):
                yield prefix + name, full_tensor(param.detach()).cpu()

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
            prefix = f"{class_name(root)}{len(self.roots) + 1}." if self.roots else ""
            self.roots[root] = prefix
            shared = any(each.sharding_strategy is not ShardingStrategy.NO_SHARD for each in fsdp1_wrappers(root))
            for name, param in named_parameters(root):
                self._known.setdefault(id(param), (prefix + name, param, shared or _is_shard(param)))


def _roots() -> list[nn.Module]:
    """Return the modules that are in no other one, those with most parameters first; DDP's content for DDP."""
    modules = living_modules()
    inside = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inside]
    bare: list[nn.Module] = [each.module if isinstance(each, DistributedDataParallel) else each for each in roots]
    return sorted(bare, key=lambda root: -sum(1 for _ in root.parameters()))


def _is_shard(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(isinstance(each, Replicate) for each in tensor.placements)


@dataclass(slots=True)
class Step:
    """What went before one optimizer step."""

    # the values that backward was called on; each rank's by its part of what a mean is over
    losses: list[float] = field(default_factory=list)
    line: str = ""  # of the script, where backward was called last
    rows: int | None = None  # rows of the first batch, by the first tensor that a module was given
    content: float = 0.0  # the sum of that tensor
    draws: bool = False  # whether random numbers were drawn between forward and backward
    # a digest of the random generators at the backward: equal where a process has drawn the same so far
    random: str = ""
    # for each parameter the sum of its squared gradient here, and whether others have more of it
    gradients: dict[str, tuple[float, bool]] = field(default_factory=dict)


class Recorder:
    """One process's record."""

    def __init__(self) -> None:
        self.steps: list[Step] = []  # in their order, over all optimizers
        # Before the first step: each parameter's sum of squares here, and whether others have more; layers that
        # compute something else with another batch.
        self.start: dict[str, tuple[float, bool]] = {}
        self.layers: list[str] = []
        self.models = NamedModels()
        self.count: Callable[[Any], None] = lambda _: None  # after a step that no optimizer of torch's makes
        self._now = Step()
        self._state: torch.Tensor | None = None
        self._depth = 0
        self._built = False

    def install(self) -> None:
        """Begin to record, until the process ends."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def end_step(optimizer: Optimizer, *_: Any) -> None:
            self._end_step(param for group in optimizer.param_groups for param in group["params"])

        build, compile_ = Optimizer.__init__, torch.compile

        @functools.wraps(build)
        def noted(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._built = True
            build(optimizer, *args, **kwargs)

        def compile_in_parts(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            """Compile without `fullgraph` for `model.compile()`, whose graph breaks at `_forward`."""
            if getattr(model, "__name__", "") == CALL_METHOD:
                kwargs.pop("fullgraph", None)
            return compile_(model, *args, **kwargs)

        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(end_step)
        torch.autograd.backward = self._recorded(torch.autograd.backward)
        Optimizer.__init__ = noted  # type: ignore[method-assign, assignment]
        torch.compile = compile_in_parts

    def facts(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {
            "steps": [{name: getattr(step, name) for name in Step.__slots__} for step in self.steps],
            "start": self.start,
            "layers": self.layers,
            "told": messages.unequal,
        }

    def _forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._now.rows is not None or not torch.is_grad_enabled() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        if next(module.parameters(), None) is None:  # a transform of the dataset, which is given one row
            return
        batch = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()), None)
        if batch is None or batch.is_meta or is_of_transform(batch):  # a count of operations has no values
            return
        batch = full_tensor(batch.detach())
        self._now.rows, self._now.content = batch.shape[0], batch.double().sum().item()
        self._state = torch.get_rng_state()

    def _recorded(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
            counted = not self._depth and self._loss(loss)
            self._depth += 1
            try:
                done = backward(tensors, *args, **kwargs)
            finally:
                self._depth -= 1
            if counted and not self._depth and not self._built:
                self._end_step(each for root in _roots() for each in root.parameters() if each.grad is not None)
                self.count(self)
            return done

        return recorded

    def _loss(self, loss: Any) -> bool:
        """Record a loss; return whether it is one."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_meta:
            return False
        if self._state is not None:
            self._now.draws = self._now.draws or not torch.equal(self._state, torch.get_rng_state())
        self._now.random = random_digest()
        self._now.losses.append(full_tensor(loss.detach()).float().item())
        self._now.line = script_line()
        return True

    def _end_step(self, params: Iterable[nn.Parameter]) -> None:
        known = self.models.named(params)
        if not self.start:
            self.start, self.layers = self.models.squares(), self.models.layers()
        for name, param, shared in known:
            if (grad := param.grad) is not None:
                # A script may have given a sharded parameter a gradient that each worker holds in full.
                of_all = _is_shard(grad) if isinstance(param, DTensor) else shared
                self._now.gradients[name] = (_sum_of_squares(grad), of_all)
        self.steps.append(self._now)
        self._now, self._state = Step(), None


class LastDigits:
    """Changes each parameter of a process once, up or down by the rounding of its dtype, by chance of its own."""

    def __init__(self) -> None:
        self.changed: dict[int, nn.Parameter] = {}  # by id; kept alive, so that no id returns
        self._generator = torch.Generator("cpu").manual_seed(0)

    def before_forward(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        """Multiply each element of a module's own parameters by 1 plus or minus the dtype's epsilon."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        for param in module.parameters(recurse=False):
            # Only plain tensors of real numbers: no lazy one, none of torch.func's.
            has_values = type(param) is nn.Parameter and param.is_floating_point() and not param.is_meta
            if has_values and id(param) not in self.changed:
                self.changed[id(param)] = param
                up = torch.randint(0, 2, param.shape, generator=self._generator, device="cpu").bool()
                epsilon = torch.finfo(param.dtype).eps
                one = torch.ones((), dtype=param.dtype)
                param.data.mul_(torch.where(up, one + epsilon, one - epsilon).to(param.device))


PARAMETERS = "parameters.safetensors"
_recorders: list[tuple[Recorder, int | None]] = []
"""What records this process, and which worker it is; None for the plain one. The script may set RANK itself."""


def record(steps: int) -> None:
    """Record the script that is about to run, and end it after so many optimizer steps."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    seed_all(SEED)
    shuffle_alike_of_accelerate()
    recorder = Recorder()
    recorder.install()
    if _is_changed():
        register_module_forward_pre_hook(LastDigits().before_forward)
    _recorders.append((recorder, None if rank_variable("RANK") is None else rank()))

    def finish_at_step(_stepping: Any) -> dict[str, Any]:
        finish()
        return {}

    recorder.count = stop_after(steps, finish_at_step)


def finish() -> None:
    """Write the record of a script that ended before its steps were made."""
    while _recorders:
        recorder, worker = _recorders.pop()
        folder, facts = Path(os.environ[COMPARE_DIR]), recorder.facts()
        if worker is None and not _is_changed():
            tensors = {
                name: value.clone(memory_format=torch.contiguous_format)
                for name, value in recorder.models.full_tensors()
            }
            save_file(tensors, folder / PARAMETERS)
        else:
            facts["parameters"] = found = dict[str, float | None]()
            with safe_open(folder / PARAMETERS, framework="pt") as file:
                names = set(file.keys())
                for name, value in recorder.models.full_tensors():
                    found[name] = _distance(value, file.get_tensor(name)) if name in names else None
        own = COMPARED_CHANGED if _is_changed() else COMPARED_PLAIN
        write_json(folder / (own if worker is None else f"rank{worker}.json"), facts)


def _is_changed() -> bool:
    """Return whether this is the process whose weights change in their last digits."""
    return os.environ.get(COMPARE_CHANGED) == "1"


def _distance(value: torch.Tensor, plain: torch.Tensor) -> float | None:
    """Return the largest difference, relative to the largest plain value where that is above 1.

    What is infinite or NaN in both is equal.
    """
    if value.shape != plain.shape:
        return None
    if not value.numel():
        return 0.0
    one, other = value.double(), plain.double()
    equal = (one == other) | (one.isnan() & other.isnan())
    largest = other.abs().nan_to_num(0.0, posinf=0.0).max().clamp(min=1.0)
    return float(((one - other).abs().masked_fill(equal, 0.0).max() / largest).item())


def main(argv: list[str]) -> None:
    """Run and record the plain process; the workers' own set-up seeds what a script of theirs leaves to chance."""
    with seeding_from(SEED):
        record(int(os.environ[REHEARSAL_STEPS]))
        try:
            run_target(parse_target(argv))
        finally:
            finish()


if __name__ == "__main__":
    # Through the imported module: this one, the interpreter's first `__main__`, is replaced by the script.
    import_module("fsdplaunch.comparison.record").main(sys.argv[1:])
