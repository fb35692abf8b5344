"""Files of ours, and beside ours, that somebody else has changed: believed where they can be, else named.

Manifests of checkpoints, the files of runs, a model's folder; JSON that says something else, odd files in the
place of plain ones, names that are none.
"""

import json
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save

from fsdplaunch.checkpoint.manifest import write_manifest
from fsdplaunch.checkpoint.merge.merge import merge
from fsdplaunch.checkpoint.model_weights import find_weight_files
from fsdplaunch.errors import LaunchError
from fsdplaunch.runtime.saving.checkpoint_dirs import find_checkpoint
from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.inputs import Content, give
from scripts.campaigns.attack_classes.messages import WRONG, mutations

COUNT = 200
_WEIGHTS = {"w": torch.arange(600.0).view(20, 30)}
_NAMES = ("a\0b", "\ud800", "a\nb", "../../x", "/etc/passwd", "", ".", "x" * 300, "\x1b[2J\u202e", "a/" * 200)
_LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_LLAMA |= {"num_attention_heads": 4, "vocab_size": 100}
_RUN: dict[str, Any] = {
    "plan.json": {"script": "train.py", "argv": ["a"], "env": {}},
    "job.json": {"route": "here", "host": socket.gethostname(), "pid": 2**22 + 5, "since": 1},
    "result.json": {"exit_code": 1, "seconds": 1.0, "stopped_by": None, "failure": None},
}
_LOOKS = (
    *(["runs", "--log-dir", "."], ["runs", "--log-dir", ".", "--json"], ["runs", "logs", "r1", "--log-dir", "."]),
    *(["runs", "logs", "r1", "--rank", "0", "--log-dir", "."], ["runs", "cancel", "r1", "--log-dir", "."]),
)


def _odd(chance: random.Random) -> Content:
    """Return what is no plain file."""
    kinds: tuple[Content, ...] = (
        os.mkfifo,
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/proc/self/mem"),
        lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
    )
    return chance.choice(kinds)


def other_json(value: Any, chance: random.Random) -> bytes:
    """Return JSON that says something else, or bytes that are none."""
    if chance.random() < 0.25:
        name, good = chance.choice(_NAMES), json.dumps(value)
        broken = (b"", b"\xff", b"[" * 9_000, b"9" * 10_000, b"null", good.encode("utf-16"), good.encode()[:-2])
        doubled = good[:-1] + "," + good[1:]
        return chance.choice(
            [*broken, doubled.encode(), json.dumps({name: value}).encode(), b"\xef\xbb\xbf" + good.encode()]
        )
    changed = mutations(value, chance)
    if isinstance(changed, dict) and chance.random() < 0.3:
        changed = {**changed, chance.choice(_NAMES): chance.choice(WRONG)}
    return json.dumps(changed).encode()


def changed_run(chance: random.Random) -> None:
    """Change a run's folder, and look at it with every command."""
    files: dict[str, Content] = {f"r1/{name}": json.dumps(value).encode() for name, value in _RUN.items()}
    files["r1/ranks/0/stdout.log"] = b"\x1b]0;x\x07loss \x9b2J\xc2\x9b1\n"
    name = chance.choice(sorted(files))
    known = _RUN.get(name.removeprefix("r1/"))
    files[name] = _odd(chance) if chance.random() < 0.3 else other_json(known, chance)
    if chance.random() < 0.2:
        files["latest"] = chance.choice(
            [lambda path: path.symlink_to("latest"), lambda path: path.symlink_to("/etc"), b"x"]
        )
    give(list(chance.choice(_LOOKS)), files, on_terminal=True)


def changed_model(chance: random.Random) -> None:
    """Change what stands in a model's folder, and estimate it."""
    header = save(_WEIGHTS)
    index = {"metadata": {"total_size": 2400}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    if chance.random() < 0.5:
        index["weight_map"] = {chance.choice([*_NAMES, "w"]): chance.choice([*_NAMES, "model.safetensors"])}
    files: dict[str, Content] = {
        "m/config.json": json.dumps(_LLAMA).encode(),
        "m/model.safetensors.index.json": json.dumps(index).encode(),
        "m/model-00001-of-00001.safetensors": header,
        "m/tokenizer.json": b"{}",
    }
    name = chance.choice(sorted(files))
    known = index if "index" in name else _LLAMA
    files[name] = _odd(chance) if chance.random() < 0.3 else other_json(known, chance)
    give(["estimate", "m"], files)


def changed_manifest(chance: random.Random) -> None:
    """Change a checkpoint's manifest: it is merged right or refused, and the search ends at some checkpoint."""
    with tempfile.TemporaryDirectory() as base:
        root = Path(base)
        for number in (1, 2):
            folder = root / f"checkpoint-{number}"
            dcp.save({"model": _WEIGHTS}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
            write_manifest(folder, {"models": [{"tied": []}], "world_size": 1}, number)
        path = root / "checkpoint-2" / "fsdplaunch.json"
        good = json.loads(path.read_text())
        if chance.random() < 0.3:
            good["files"][f"pytorch_model_fsdp_0/{chance.choice(_NAMES)}"] = 1
        path.unlink()
        content = _odd(chance) if chance.random() < 0.3 else other_json(good, chance)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content)
        try:
            found, skipped = find_checkpoint(root)
        except LaunchError as problem:  # such as a file of the kernel's, whose reads fail
            assert "cannot be read" in problem.message
        else:
            assert found is not None
            assert all(len(note) < 4096 for note in skipped)
        try:
            merge(path.parent, root / "out")
        except LaunchError as problem:
            assert len(problem.message) < 4096
        else:
            assert torch.equal(load_file(root / "out" / "model.safetensors")["w"], _WEIGHTS["w"])


def changed_header(chance: random.Random) -> None:
    """Change the header of a model's safetensors: overlaps, negative and huge offsets, names, keys twice."""
    part = save(_WEIGHTS)
    with tempfile.TemporaryDirectory() as base:
        length = int.from_bytes(part[:8], "little")
        text = _other_header(json.loads(part[8 : 8 + length]), chance)
        size = chance.choice([*[len(text)] * 9, 0, 7, 2**63, len(text) + 9999])
        Path(base, "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + part[8 + length :])
        try:
            find_weight_files(Path(base))
        except LaunchError as problem:
            assert len(problem.message) < 4096, problem.message


def _other_header(header: dict[str, Any], chance: random.Random) -> bytes:
    entry, values = header["w"], (-1, 1, 2**62, 2**64, 1e9, "0", None, True, [], 1199, 1201, 2**31)
    match chance.choice(["offset", "shape", "dtype", "any", "twice"]):
        case "offset":
            entry["data_offsets"][chance.randrange(2)] = chance.choice(values)
        case "shape":
            shapes = ([10], [30, 10], [10, 30, 1], [0, 30], [2**40, 2**40], [10.0, 30], [-10, -30], [1] * 99, {})
            entry["shape"] = chance.choice(shapes)
        case "dtype":
            entry["dtype"] = chance.choice(["F16", "I32", "X", "", 3, None, "BOOL", "F64", "f32"])
        case "any":
            header = mutations(header, chance)
        case "twice":
            again = json.dumps(mutations(entry, chance))
            return (json.dumps(header)[:-1] + f',"w":{again}}}').encode()
    return json.dumps(header).encode()


ATTACKS: tuple[Callable[[random.Random], None], ...] = (
    *(changed_run, changed_run, changed_model, changed_manifest, changed_header),
)


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases."""
    for number in range(count or COUNT):
        attack, seed = ATTACKS[number % len(ATTACKS)], chance.random()
        yield Case(name=f"{number}: {attack.__name__}", attack=lambda a=attack, s=seed: a(random.Random(s)))
