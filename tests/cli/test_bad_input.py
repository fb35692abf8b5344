"""Every wrong input: its exit code, one clear message, no traceback, nothing started, nothing written."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "print('it ran')\n"


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        ({}, ["launch"], ["no script given", "fsdplaunch launch train.py"]),
        ({}, ["launch", "nope.py"], ["script not found: nope.py"]),
        ({"train.py": ""}, ["launch", "trian.py"], ["script not found: trian.py", "did you mean train.py?"]),
        ({"folder/x.py": ""}, ["launch", "folder"], ["folder is a folder, not a script"]),
        ({"t.py": SCRIPT}, ["launch", "-c", "nope.yaml", "t.py"], ["nope.yaml"]),
        ({"t.py": SCRIPT, "fsdp.yaml": "a: [1,\nb: 2\n"}, ["launch", "t.py"], ["fsdp.yaml:3", "is not YAML"]),
        ({"t.py": SCRIPT, "fsdp.yaml": "- a\n- b\n"}, ["launch", "t.py"], ["fsdp.yaml", "mapping"]),
        (
            {"t.py": SCRIPT, "fsdp.yaml": "fsdp_config:\n  fsdp_sharding_stratgy: 1\n"},
            ["launch", "t.py"],
            ["fsdp.yaml:2:3", "fsdp_sharding_stratgy", "did you mean fsdp_sharding_strategy"],
        ),
        (
            {"t.py": SCRIPT, "fsdp.yaml": "num_machines: one\nmixed_precision: bf17\n"},
            ["launch", "t.py"],
            ["fsdp.yaml:1:", "num_machines", "fsdp.yaml:2:", "mixed_precision", "2 problems"],
        ),
        ({"t.py": SCRIPT}, ["launch", "--set", "nope=1", "t.py"], ["nope"]),
        ({"t.py": SCRIPT}, ["launch", "--num-processes", "many", "t.py"], ["num_processes", "many"]),
        ({"t.py": SCRIPT}, ["launch", "--nope", "t.py"], ["--nope"]),
        ({}, ["nope"], ["nope"]),
        ({}, ["merge-weights"], ["CHECKPOINT"]),
        ({"out/x": ""}, ["merge-weights", "nope", "out"], ["nope"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_ends_with_2_and_one_message(cli, tmp_path, files, arguments, said):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = listing(tmp_path)
    done = cli(*arguments)
    assert done.returncode == 2, done.stderr
    for text in said:
        assert text.lower() in done.stderr.lower()
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert listing(tmp_path) == before


def test_folder_that_has_been_removed_is_named(tmp_path):
    command = 'cd "$1" && rmdir "$1" && exec "$2" -P -m fsdplaunch launch t.py'
    (tmp_path / "gone").mkdir()
    words = ["sh", "-c", command, "sh", str(tmp_path / "gone"), sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "error: the current folder has been removed" in done.stderr
