"""Files that a script for one process writes itself are, over ranks, those of one process."""

import json
from pathlib import Path

from tests.scripts.conftest import Forks

NO_TEST = """
import sys  # this process began in a file that names ranks, as no launched worker does
for name in [name for name, module in sys.modules.items() if "forks.py" in str(vars(module).get("__file__"))]:
    del sys.modules[name]
"""

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
    script = tmp_path / "train.py"
    script.write_text(NO_TEST + SCRIPT)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "begun.txt").write_text("of an earlier run")
    done = forks.run(script, folder, ranks=2, timeout=60)
    assert done.codes == [0, 0], done.err
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
    line = (NO_TEST + SCRIPT).split("open(", maxsplit=1)[0].count("\n") + 1
    assert f"train.py:{line}: rank 0 alone writes begun.txt and other text files" in done.err[0]
