"""What a divided pass draws on a GPU is drawn for the global batch; tensors without values show it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdplaunch.runtime.auto.batch.in_pass import Draws, GlobalDraws, UndividedError, recording_draws
from fsdplaunch.runtime.auto.batch.rank_rows import RankRows


class Drawn(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            first = result[0] if isinstance(result, tuple) else result
            self.shapes.append((tuple(first.shape), first.device.type))
        return result


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.nn.functional.dropout(x, 0.5),
        torch.randn_like,
        lambda x: torch.rand(x.shape, device=x.device),
    ],
    ids=["dropout", "randn_like", "rand"],
)
def test_a_draw_on_a_gpu_is_that_of_all_rows(draw):
    rows, draws = RankRows(total=8, rank=1, ranks=2), Draws()
    with FakeTensorMode():
        whole, part = torch.empty(8, 3, device="cuda"), torch.empty(4, 3, device="cuda")
        with recording_draws(draws):
            draw(whole)
        with Drawn() as drawn, GlobalDraws(rows, draws, learning=True):
            own = draw(part)
    assert drawn.shapes == [((8, 3), "cuda")]
    assert own.shape == (4, 3)


def test_a_fused_attention_that_drops_out_is_computed_with_all_rows():
    rows, draws = RankRows(total=8, rank=0, ranks=2), Draws()

    def attend(x):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(x, x, x, 0.5)[0]

    with FakeTensorMode():
        whole, part = (torch.empty(n, 2, 16, 8, device="cuda", dtype=torch.float16) for n in (8, 4))
        with recording_draws(draws):
            attend(whole)
        with GlobalDraws(rows, draws, learning=True), pytest.raises(UndividedError):
            attend(part)
