"""Files that a script for one process writes itself are, over ranks, those of one process."""

import json
import re
from pathlib import Path

import pytest

from tests.scripts.conftest import Forks

SCRIPT = """
import csv, json, logging, os, pathlib, random, time
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
late = random.SystemRandom()
if os.path.exists("begun.txt"):
    os.remove("begun.txt")
with open("begun.txt", "a") as file:
    file.write("begun")
with open("new.txt", "x") as file:
    file.write("new")
logging.basicConfig(filename="train.log", level=logging.INFO, format="%(message)s")
kept = open("kept.csv", "w", newline="")
rows = csv.writer(kept)
for epoch in range(3):
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    rows.writerow([epoch, "x" * late.randrange(9)])
    logging.info("epoch %d", epoch)
    with open("log.csv", "a") as log:
        log.write(f"{epoch}\\n")
for epoch in range(12):
    path = pathlib.Path(f"{epoch % 2}.json")
    time.sleep(late.random() * 0.01)
    path.write_text(json.dumps([epoch] * 3000))
    assert json.loads(path.read_text())[0] == epoch
    model(torch.randn(8, 4)).pow(2).mean().backward()  # all have read before it is written again
kept.close()
"""


def test_files_that_every_rank_writes_are_written_once(forks: Forks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "begun.txt").write_text("of an earlier run")
    forks.passes(SCRIPT, folder, ranks=2, timeout=60)
    written = {path.name: path.read_text() for path in folder.iterdir()}
    kept = written.pop("kept.csv").splitlines()
    assert [line[:2] for line in kept] == ["0,", "1,", "2,"]
    assert all(set(line[2:]) <= {"x"} for line in kept)
    assert written == {
        "begun.txt": "begun",
        "new.txt": "new",
        "train.log": "epoch 0\nepoch 1\nepoch 2\n",
        "log.csv": "0\n1\n2\n",
        "0.json": json.dumps([10] * 3000),
        "1.json": json.dumps([11] * 3000),
    }


LIBRARY = """
import os, pathlib, random, time, zipfile
late = random.SystemRandom()
def save(path, rows):
    with zipfile.ZipFile(path, mode="w") as archive:
        for number in range(rows):
            time.sleep(late.random() * 0.01)
            archive.writestr(f"{number}.txt", str(number) * 1000)
def cache(folder):
    path = pathlib.Path(folder, "entry.bin")
    path.write_bytes(os.environ["RANK"].encode())
    return path.read_bytes()
def own_file():
    path = pathlib.Path(f"state-{os.environ['RANK']}.bin")
    path.write_bytes(b"own")
    return path.read_bytes()
"""

BYTES = """
import os, pathlib, pickle, sys, tempfile, zipfile
import torch
sys.path.insert(0, "site-packages")
import library
library.save("before.zip", 2)  # nothing is sharded yet
model = torch.nn.Linear(4, 1).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(4):
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    library.save("model.zip", 5 + number)
    with zipfile.ZipFile("model.zip") as archive:
        assert archive.testzip() is None and len(archive.namelist()) == 5 + number
    with open("values.pkl", "wb") as file:
        pickle.dump(list(range(20000 + number)), file)
        file.flush()
    with open("values.pkl", "rb") as file:
        assert len(pickle.load(file)) == 20000 + number
rank = os.environ["RANK"]
for everybodys in (f"../outside-{rank}.txt", f".cache/{rank}.txt"):
    path = pathlib.Path(everybodys)
    path.parent.mkdir(exist_ok=True)
    path.write_text("of each rank")
os.makedirs("../saves", exist_ok=True)
torch.save([1], "../saves/one.pt")  # whose folder is rank 0's from then on
pathlib.Path("../saves/log.txt").write_text(rank)
pathlib.Path("0.old").unlink()
os.remove("1.old")
refused = [lambda: os.symlink("values.pkl", "latest"), lambda: os.truncate("values.pkl", 0)]
for refuse in (*refused, lambda: os.unlink("values.pkl")):
    try:
        if rank == "1":
            refuse()
    except OSError as error:
        print(error)
print(library.cache(tempfile.mkdtemp()).decode(), library.own_file().decode())
"""


def test_files_of_bytes_are_complete_when_a_rank_reads_them(forks: Forks, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(BYTES)
    (folder / "site-packages").mkdir(parents=True)
    (folder / "site-packages" / "library.py").write_text(LIBRARY)
    for name in ("0.old", "1.old"):
        (folder / name).touch()
    done = forks.passes(script, folder, "2", ranks=2, timeout=60)
    assert [out.split()[-2:] for out in done.out] == [["0", "own"], ["1", "own"]]  # caches; names of their own
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        *("before.zip", "model.zip", "values.pkl", "state-0.bin"),
    }
    refused = re.findall(r"train\.py:\d+: os\.(\w+) of .* on rank 1: rank 0 has the files", done.out[1])
    assert refused == ["symlink", "truncate", "unlink"]
    assert sorted(path.name for path in tmp_path.glob("outside-*")) == ["outside-0.txt", "outside-1.txt"]
    assert sorted(path.name for path in (folder / ".cache").iterdir()) == ["0.txt", "1.txt"]
    assert (tmp_path / "saves" / "log.txt").read_text() == "0"
    assert "only this rank writes " in done.err[1]
    assert "state-1.bin: its file is discarded" in done.err[1]


CACHED = """
import os, pickle, sys, time
import torch
rank = os.environ["RANK"]
model = torch.nn.Linear(4, 1).to("cpu")
if rank != sys.argv[1]:
    time.sleep(0.7)
if os.path.exists("cache.pkl"):
    rows = pickle.load(open("cache.pkl", "rb"))
else:
    with open("cache.pkl", "wb") as file:
        file.write(pickle.dumps(list(range(50000)))[:10000])
        file.flush()
        time.sleep(1.5)
        file.write(pickle.dumps(list(range(50000)))[10000:])
    rows = pickle.load(open("cache.pkl", "rb"))
if os.path.exists("cache.pt"):
    values = torch.load("cache.pt")
else:
    torch.save(torch.arange(200000), "cache.pt")
    values = torch.load("cache.pt")
print(len(rows), len(values))
"""


@pytest.mark.parametrize("first", ["0", "1"])
def test_a_cache_that_another_rank_is_building_is_read_when_it_is_complete(
    forks: Forks, tmp_path: Path, first: str
) -> None:
    done = forks.passes(CACHED, tmp_path / "run", first, ranks=2, timeout=60)
    assert done.out == ["50000 200000\n"] * 2
