"""How one model's layers are split: which forwards change, and which parameters are cut."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.runtime.sharding.materialize import ModelTensor
from fsdplaunch.runtime.tensor_parallel.layers import Cut
from fsdplaunch.runtime.tensor_parallel.same_gradients import check_first_gradients
from fsdplaunch.runtime.tensor_parallel.same_inputs import check_first_inputs, draw_alike
from fsdplaunch.runtime.tensor_parallel.styles import Style

Place = tuple[nn.Module, str]
"""A module, and the attribute under which it holds a parameter."""


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
    """

    axis: DeviceMesh
    origin: str
    strict: bool
    modules: dict[nn.Module, Style] = field(default_factory=dict)
    cuts: dict[Place, Cut] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)

    def cut_at(self, places: list[Place]) -> Cut | None:
        """Return how the parameter that is in these places is split; None if it is not."""
        return next((self.cuts[place] for place in places if place in self.cuts), None)

    def split_parameter(self, entry: ModelTensor) -> None:
        """Exchange a full parameter for one of which this rank has its part; leave those that are not split."""
        cut = self.cut_at(entry.places)
        if cut is not None and isinstance(entry.tensor, nn.Parameter):
            entry.exchange(cut.split(entry.tensor.detach(), self.axis))

    def expect_same_inputs(self, model: nn.Module, device: torch.device) -> None:
        """Let the ranks that split layers draw alike from now on, and compare first inputs and gradients."""
        draw_alike(self.axis)
        check_first_inputs(model, self.axis, device, "split layers together (tp_size)")
        check_first_gradients(model, self.axis, device)

    def of(self, module: nn.Module) -> dict[str, Cut]:
        """Return the cuts of a module's own parameters, by attribute."""
        return {attribute: cut for (holder, attribute), cut in self.cuts.items() if holder is module}
