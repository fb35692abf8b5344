"""Rank 0 alone computes with shards, and keeps copies: torch would gather them of ranks that are elsewhere."""

from pathlib import Path

from tests.scripts.conftest import Forks

SCRIPT = """
import copy, os, threading
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def step():
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def full_state():
    return {name: value.full_tensor() for name, value in model.module.named_parameters()}

COMPUTED = {
    "row": lambda w: w[0],
    "rows": lambda w: w[:2].sum(),
    "element": lambda w: w.flatten()[3],
    "first": lambda w: w.view(-1)[:5],
    "square transposed": lambda w: w.t()[0],
    "transposed": lambda w: w.detach().t().numpy(),
    "where largest": lambda w: w.argmax(),
    "histogram": lambda w: torch.histc(w.detach(), 5),
    "singular values": lambda w: torch.linalg.svdvals(w.detach()),
    "size": lambda w: w.abs().mean(),
    "zeros": lambda w: (w == 0).sum(),
    "numbers": lambda w: torch.isnan(w).any(),
    "energy": lambda w: (w**2).sum(),
    "similarity": lambda w: torch.cosine_similarity(w[0], w[1], dim=0),
    "together": lambda w: torch.cat([w.reshape(-1), w.flatten()]).mean(),
}

def plain(value):
    return torch.tensor(value.tolist())

step()
if rank == 0:
    found = {name: plain(compute(model.module[0].weight)) for name, compute in COMPUTED.items()}
    try:
        model.module[0].weight.topk(2).values.sum()
    except RuntimeError as error:
        print("refused", "rank 0 only" in str(error), "numpy()" in error.hint)
full = full_state()
if rank == 0:
    for name, compute in COMPUTED.items():
        torch.testing.assert_close(found[name], plain(compute(full["0.weight"])), msg=name)

kept = threads = None
for number in range(4):
    step()
    before = full_state()
    state = {name: value.clone() for name, value in optimizer.state[model.module[0].weight].items()}
    moment = state["exp_avg"].full_tensor()
    if rank == 0:
        now = model.module.state_dict()
        if kept is None:
            average = {name: value.clone() for name, value in now.items()}
            expected = dict(before)
            threads = []
        average = {name: 0.5 * average[name].mul_(0.5).add_(value, alpha=0.5) for name, value in now.items()}
        expected = {name: 0.25 * expected[name] + 0.25 * value for name, value in before.items()}
        if number == 1:
            weights = {name: value.cpu().clone() for name, value in now.items()}
            kept = weights, copy.deepcopy(optimizer.state_dict())
            best, best_moment = before, moment
        kept = kept or True
        halves = {name: value.detach().half() for name, value in now.items()}
        threads.append(threading.Thread(target=torch.save, args=(halves, f"half-{number}.pt")))
        threads[-1].start()
        torch.save([halves, average], f"both-{number}.pt")
        for name, value in before.items():
            torch.testing.assert_close(average[name], expected[name], msg=name)
            assert torch.equal(torch.load(f"both-{number}.pt")[0][name], value.half()), name

if rank == 0:
    torch.save({"best": kept[0], "optimizer": kept[1]}, "best.pt")
    saved = torch.load("best.pt")
    assert all(torch.equal(saved["best"][name], value) for name, value in best.items())
    assert torch.equal(saved["optimizer"]["state"][0]["exp_avg"], best_moment)
    for number, thread in enumerate(threads):
        thread.join()
        assert all(type(value) is torch.Tensor for value in torch.load(f"half-{number}.pt").values())
    print("compared")
"""


def test_rank_0_alone_computes_with_shards_and_keeps_copies_of_them(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = forks.run(script, tmp_path / "run", ranks=2, timeout=60)
    assert done.codes == [0, 0], "\n".join(done.err)
    assert done.out[0].splitlines() == ["refused True True", "compared"]
