"""How one model's layers are split: which forwards change, and which parameters are cut."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.runtime.inspection.model_tensors import ModelTensor
from fsdplaunch.runtime.tensor_parallel.compare_passes import FirstPass
from fsdplaunch.runtime.tensor_parallel.layers import Cut
from fsdplaunch.runtime.tensor_parallel.same_gradients import check_first_gradients
from fsdplaunch.runtime.tensor_parallel.same_inputs import check_first_inputs, draw_alike
from fsdplaunch.runtime.tensor_parallel.styles import Style
from fsdplaunch.runtime.torch_internals.wrappers import untraced

Place = tuple[nn.Module, str]
"""A module, and the attribute under which it holds a parameter."""


@dataclass(slots=True, kw_only=True)
class SplitNow:
    """Whether layers compute in parts at present; a pass to compare with computes them in full on every rank."""

    layers: bool = True


@dataclass(slots=True, kw_only=True)
class SplitPlan:
    """How a model's layers are split.

    Attributes:
        axis: The ranks that split them.
        origin: Whose plan it is.
        strict: Whether what cannot be split is an error; what a model's own plan says of its vocabulary is not.
        modules: What becomes of each module's forward.
        cuts: How parameters are split.
        names: Of the modules.
        now: Of all its layers.
    """

    axis: DeviceMesh
    origin: str
    strict: bool
    modules: dict[nn.Module, Style] = field(default_factory=dict)
    cuts: dict[Place, Cut] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)
    now: SplitNow = field(default_factory=SplitNow)

    def cut_at(self, places: list[Place]) -> Cut | None:
        """Return how the parameter that is in these places is split; None if it is not."""
        return next((self.cuts[place] for place in places if place in self.cuts), None)

    def split_parameter(self, entry: ModelTensor) -> None:
        """Exchange a full parameter for one of which this rank has its part; leave those that are not split."""
        cut = self.cut_at(entry.places)
        if cut is not None and isinstance(entry.tensor, nn.Parameter):
            entry.exchange(cut.split(entry.tensor.detach(), self.axis))

    def expect_same_inputs(self, model: nn.Module, device: torch.device, computes_in: torch.dtype | None) -> None:
        """Let the ranks that split layers draw alike from now on, and compare their first passes."""
        draw_alike(self.axis)
        self.compare_first_pass(model, computes_in)
        check_first_inputs(model, self.axis, device, "split layers together (tp_size)")
        check_first_gradients(model, self.axis, device)

    def compare_first_pass(self, model: nn.Module, computes_in: torch.dtype | None) -> None:
        """Compare the model's first pass with one in which every rank computes with full layers."""

        def choose(split: bool) -> None:
            self.now.layers = split

        alone = "rowwise follows colwise, and layers take sizes from their inputs"
        remedy = alone if self.strict else "write another as sharding.tensor_parallel_plan"
        hint = f"{self.origin} does not fit what its layers compute: {remedy}"
        first = FirstPass("split layers (tp_size)", hint, choose, computes_in)

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not first.running:
                first.compare(module, args, kwargs)

        model.register_forward_pre_hook(untraced(begin), prepend=True, with_kwargs=True)

    def of(self, module: nn.Module) -> dict[str, Cut]:
        """Return the cuts of a module's own parameters, by attribute."""
        return {attribute: cut for (holder, attribute), cut in self.cuts.items() if holder is module}
