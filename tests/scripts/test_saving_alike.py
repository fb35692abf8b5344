"""What decides about saving: validation losses are equal on all ranks; rank 0 may save alone, no other rank."""

from pathlib import Path

import pytest
import torch

from tests.scripts.conftest import Forks

IMPATIENT = """
from fsdplaunch.runtime.collectives import waits
waits.NOTICE_SECONDS, waits.CONFIRM_SECONDS, waits.STILL_SECONDS = 0.5, 0.5, 0.5
"""

HEAD = """
import os, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x, held_out = torch.utils.data.random_split(torch.randn(64, 4), [0.8, 0.2])
x, held_out = x[:], held_out[:]

def batch(x=x):
    chosen = x[torch.randint(len(x), (8,))]
    return chosen, chosen.sum(1, keepdim=True) ** 2

def step():
    inputs, wanted = batch()
    loss = nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""

BEST_OF_VALIDATION = """
@torch.no_grad()
def validate():
    model.eval()
    batches = [batch(held_out), batch(held_out)]
    loss = sum(nn.functional.mse_loss(model(inputs), wanted).item() for inputs, wanted in batches)
    model.train()
    return loss

best = float("inf")
for epoch in range(3):
    train, now = step(), validate()
    print(f"{train:.6f} {now:.6f} {now < best} {x.sum():.6f}")
    if now < best:
        best = now
        torch.save(model.state_dict(), "best.pt")
"""

BEST_OF_TRAINING = """
best = float("inf")
for epoch in range(20):
    loss = step()
    if loss < best:
        best = loss
        torch.save(model.state_dict(), "best.pt")
"""

GUARDED = """
step()
if os.environ.get("RANK", "0") == "0":
    torch.save({"model": model.state_dict(), "done": True}, "last.pt")
"""

FILES = """
import shutil, tempfile, time
from pathlib import Path
os.makedirs("out/empty")
for epoch in range(2):
    step()
    state = model.state_dict()
    torch.save(state, "out/part.pt")
    if os.path.exists("out/last.pt"):
        os.remove("out/last.pt")
    os.rename("out/part.pt", "out/last.pt")
    shutil.copyfile("out/last.pt", f"out/{epoch}.pt")
    with tempfile.NamedTemporaryFile(dir="out", delete=False) as part:
        torch.save(state, part)
    os.replace(part.name, "out/best.pt")
    with tempfile.NamedTemporaryFile(dir="out", delete=False) as part:
        torch.save({"epoch": epoch}, part)
    os.replace(part.name, "out/epoch.bin")
    number, part = tempfile.mkstemp(dir="out")
    os.close(number)
    torch.save({"epoch": epoch}, part)
    os.replace(part, "out/number.bin")
    with open("out/meta.part", "wb") as file:
        torch.save({"epoch": epoch}, file)
    os.replace("out/meta.part", "out/meta.bin")
    shutil.copy("out/last.pt", "out/copy.pt")
    os.mkdir("next")
    torch.save(state, "next/model.pt")
    shutil.rmtree("whole", ignore_errors=True)
    os.rename("next", "whole")
    Path("out/log.part").write_text(str(epoch))
    Path(f"written-{epoch}-{os.environ.get('RANK', '0')}").touch()
    while len(list(Path().glob(f"written-{epoch}-*"))) < int(os.environ.get("WORLD_SIZE", "1")):
        time.sleep(0.01)
    Path("out/log.part").rename("out/log.txt")
os.rename("out/0.pt", "out/first.pt")
for gone in ("out/none.pt", "out/best.pt/x.pt"):
    try:
        os.rename(gone, "out/gone.pt")
    except OSError as error:
        print(type(error).__name__)
if os.environ.get("RANK", "0") == "0":
    os.replace("out/copy.pt", "out/guarded.pt")
print("the same" if torch.load("out/last.pt").keys() == state.keys() else "another")
"""

OWN_FOLDERS = """
import tempfile, uuid
from safetensors.torch import load_file, save_model
for epoch in range(2):
    with tempfile.TemporaryDirectory() as folder:
        best = os.path.join(folder, "best.pt")
        for _ in range(2):
            torch.save(model.state_dict(), best)
            step()
        model.load_state_dict(torch.load(best))
        save_model(model, os.path.join(folder, "model.safetensors"))
        model.load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
    out = f"run-{uuid.uuid4().hex}"
    os.makedirs(out)
    torch.save(model.state_dict(), f"{out}/last.pt")
    torch.save(model.state_dict(), f"{out}/last.pt")
    model.load_state_dict(torch.load(f"{out}/last.pt"))
    step()
    print(sorted(os.listdir(out)), [f"{param.sum().item():.5f}" for param in model.parameters()])
"""

IN_TWO_PLACES = """
if os.environ["RANK"] == "0":
    torch.save(model.state_dict(), "one.pt")
else:
    torch.save(model.state_dict(), "other.pt")
"""


def test_splits_and_validation_losses_are_equal_on_all_ranks_and_draws_are_not(
    forks: Forks, tmp_path: Path
) -> None:
    done = forks.passes(HEAD + BEST_OF_VALIDATION, tmp_path / "run", ranks=2)
    first, second = ([line.split() for line in out.splitlines()] for out in done.out)
    assert [line[1:] for line in first] == [line[1:] for line in second]
    assert all(one[0] != other[0] for one, other in zip(first[1:], second[1:], strict=True))
    assert len({line[1] for line in first}) == 3
    assert (done.folder / "best.pt").exists()


def test_rank_0_saves_alone_also_in_a_script_for_one_process(forks: Forks, tmp_path: Path) -> None:
    done = forks.passes(HEAD + GUARDED, tmp_path / "run", ranks=2, timeout=60)
    saved = torch.load(done.folder / "last.pt")
    assert saved["done"] is True
    assert saved["model"]["0.weight"].shape == (8, 4)


def test_what_a_script_does_with_saved_files_is_done_once(forks: Forks, tmp_path: Path) -> None:
    plain = forks.run(HEAD + FILES, tmp_path / "plain")
    done = forks.passes(HEAD + FILES, tmp_path / "run", ranks=2, timeout=60)
    assert done.out == plain.out * 2
    assert done.out[0].split("\n")[:2] == ["FileNotFoundError", "NotADirectoryError"]
    names = [sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("*")) for run in (plain, done)]
    names = [[name for name in each if not name.startswith("written")] for each in names]
    assert names[0] == names[1]
    states = [torch.load(file)["0.weight"] for file in done.folder.rglob("*") if file.suffix == ".pt"]
    first = torch.load(done.folder / "out/first.pt")["0.weight"]
    assert len(states) == 6
    assert [torch.load(file) for file in done.folder.rglob("*.bin")] == [{"epoch": 1}] * 3
    assert sum(torch.equal(state, first) for state in states) == 1  # of the first epoch; the others of the last


def test_each_rank_reads_what_was_saved_under_a_name_of_its_own(forks: Forks, tmp_path: Path) -> None:
    plain = forks.run(HEAD + OWN_FOLDERS, tmp_path / "plain")
    done = forks.passes(HEAD + OWN_FOLDERS, tmp_path / "run", ranks=2, launch__keep_global_batch=True, timeout=60)
    assert done.out == plain.out * 2
    assert len({path.stat().st_ino for path in done.folder.rglob("*.pt")}) == 2  # links: one file an epoch
    assert len(list(done.folder.rglob("*.pt"))) == 4


@pytest.mark.parametrize(
    ("body", "where"),
    [(BEST_OF_TRAINING, "at train.py:"), (IN_TWO_PLACES, "at the end of the script")],
    ids=["best training loss", "two places"],
)
def test_save_of_another_rank_only_ends_soon_with_the_line(
    forks: Forks, tmp_path: Path, body: str, where: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(IMPATIENT + HEAD + body)
    done = forks.run(script, tmp_path / "run", ranks=2, timeout=30)
    line = max(n for n, text in enumerate(script.read_text().splitlines(), 1) if "torch.save" in text)
    message = next(err for err in done.err if "was called on rank" in err)
    assert f"torch.save at train.py:{line} was called on rank 1 only" in message
    assert f" went on, waiting for rank 1 {where}" in message
    assert "hint: save on all ranks, or on rank 0" in message
    assert "all_reduce" in message
    assert -9 not in done.codes
