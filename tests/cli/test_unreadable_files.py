"""Files and folders that may not be read or written, by a user who is not root: one message, no traceback.

Root may read everything, and the interpreter may lie where another user cannot read it. So each command runs once
as root, which imports what it needs, and then again in the same process as nobody.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

AS_NOBODY = """
import contextlib, io, json, os, shutil, sys
from pathlib import Path
from fsdplaunch.cli.app import run
cases = json.loads(sys.argv[1])
answers = []
def once(words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = run(words)
    return status, said.getvalue()
for words, path, mode in cases:
    once(words)
for made in ("out1", "out2", "out3", "locked/out", "locked2"):
    shutil.rmtree(made, ignore_errors=True)
os.mkdir("locked2")
for words, path, mode in cases:
    os.chmod(path, int(mode, 8))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for words, path, mode in cases:
    answers.append(once(words))
print(json.dumps(answers))
"""
SECRET = "ab" * 32
CASES = [
    (["config", "validate", "bad.yaml"], "bad.yaml", "000"),
    (["launch", "--dry-run", "script.py"], "script.py", "000"),
    (["merge-weights", "ck", "out1"], "ck/.metadata", "000"),
    (["merge-weights", "data", "out2"], "data/__0_0.distcp", "000"),
    (["merge-weights", "closed", "out3"], "closed", "000"),
    (["merge-weights", "good", "locked/out"], "locked", "555"),
    (["estimate", "config.json"], "config.json", "000"),
    (["estimate", "folder"], "folder/model.safetensors", "000"),
    (["runs", "--log-dir", "myruns"], "myruns", "000"),
    (["launch", "--dry-run", "--ssh.hostfile", "hosts", "other.py"], "hosts", "000"),
    (["config", "--yes", "--output", "locked2/fsdp.yaml"], "locked2", "555"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    folder = tmp_path_factory.mktemp("closed")
    for above in (folder, *folder.parents):
        if above.stat().st_uid == os.geteuid() and str(above).startswith("/tmp/"):
            above.chmod(0o755)
    (folder / "bad.yaml").write_text("num_processes: 2\nuse_cpu: true\n")
    for name in ("script.py", "other.py"):
        (folder / name).write_text("pass\n")
    for name in ("ck", "data", "closed", "good"):
        dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder / name, no_dist=True)
    for name in ("locked", "locked2", "folder", "myruns"):
        (folder / name).mkdir()
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    llama |= {"num_attention_heads": 4, "vocab_size": 100}
    for place in (folder, folder / "folder"):
        (place / "config.json").write_text(json.dumps(llama))
    (folder / "folder" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "hosts").write_text("node1\nnode2\n")
    words = [sys.executable, "-c", AS_NOBODY, json.dumps(CASES)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP", "ACCELERATE"))}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 0, done.stderr
    return [(status, text) for status, text in json.loads(done.stdout)]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{' '.join(case[0])[:40]}" for case in CASES])
def test_it_is_one_message_that_names_the_file(answers, number):
    (_, path, _), (status, said) = CASES[number], answers[number]
    assert status in (1, 2, 3), said
    assert Path(path).name in said
    assert "permission denied" in said.lower() or "is not readable" in said, said
    assert "Traceback" not in said
    assert "this is a bug" not in said
