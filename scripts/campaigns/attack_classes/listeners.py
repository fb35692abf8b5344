"""Every way to start workers on one node: what listens meanwhile, listens on loopback only."""

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fsdplaunch.parent_death import ended_with_us
from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import environ
from scripts.campaigns.attack_classes.stores import descendants, listening

MOST_SECONDS = 240.0
_TRAINS = """
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
time.sleep(1.5)
"""
_HEAD = "import os, sys, time\nimport torch\n"
_FAILS = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(3)\n"
_OWN_GROUP = (
    _HEAD
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
time.sleep(1.5)
"""
)
_LOADER = _HEAD + "for _ in torch.utils.data.DataLoader(list(range(8)), num_workers=2): pass\n" + _TRAINS
_ACCELERATE = """
import time, torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
time.sleep(1.5)
"""
_TRAINER = """
import time, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
options = TrainingArguments("out", max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), options, train_dataset=data).train()
time.sleep(1.5)
"""
_PREPARED = "import fsdplaunch\n" + _TRAINS.replace(
    "for _", "model, optimizer = fsdplaunch.prepare(model, optimizer)\nfor _", 1
)
_NO_WRAP = ("--fsdp-auto-wrap-policy", "NO_WRAP")
_TWO = ("launch", "--cpu", "--num-processes", "2")
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a plain script": (_HEAD + _TRAINS, (*_TWO, "train.py")),
    "four workers": (_HEAD + _TRAINS, ("launch", "--cpu", "--num-processes", "4", "train.py")),
    "a restart": (_HEAD + _FAILS + _TRAINS, (*_TWO, "--max-restarts", "1", "train.py")),
    "fresh interpreters": (_HEAD + _TRAINS, (*_TWO, "--launch.preload", "none", "train.py")),
    "FSDP1": (_HEAD + _PREPARED, (*_TWO, "--fsdp-version", "1", *_NO_WRAP, "train.py")),
    "a module": (_HEAD + _TRAINS, (*_TWO, "-m", "train")),
    "a program": (_HEAD + _OWN_GROUP, (*_TWO, "--no-python", sys.executable, "train.py")),
    "a group of its own": (_OWN_GROUP, (*_TWO, "--allow-unsharded", "train.py")),
    "data loaders": (_LOADER, (*_TWO, "train.py")),
    "accelerate": (_ACCELERATE, (*_TWO, *_NO_WRAP, "train.py")),
    "the Trainer": (_TRAINER, (*_TWO, "train.py")),
    "check": (_HEAD + _TRAINS, ("check", "train.py")),
    "doctor": ("", ("doctor",)),
}


def cases(_chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: each way once."""
    for name in list(WAYS)[: count or len(WAYS)]:
        yield Case(name=name, attack=lambda name=name: watch(*WAYS[name]))


def watch(script: str, words: tuple[str, ...]) -> None:
    """Run a command and look all the time at what listens; raise where that is not on loopback, or it fails."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(script)
        log = Path(folder) / "said"
        with log.open("wb") as said:
            run = subprocess.Popen(
                [sys.executable, "-P", "-m", "fsdplaunch", *words],
                cwd=folder,
                stdout=said,
                stderr=said,
                env={**environ(), "HF_HUB_OFFLINE": "1"},
                preexec_fn=ended_with_us(),  # noqa: PLW1509  (no threads here)
            )
            end, seen = time.monotonic() + MOST_SECONDS, set()
            while run.poll() is None and time.monotonic() < end:
                seen |= set(listening(descendants(run.pid)))
                time.sleep(0.15)
            with contextlib.suppress(ProcessLookupError):
                run.kill()
        outside = {place for place in seen if not place.startswith(("127.", "[::1]"))}
        assert not outside, outside
        assert run.wait() == 0, log.read_text()[-1500:]
        assert seen or words == ("doctor",), "nothing listened: the case has not seen its run"
