"""Every command that documents and help texts print is run in a scratch folder; a launch as far as --dry-run."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from fsdplaunch.cli.app import run
from fsdplaunch.cli.commands import app, expanded
from fsdplaunch.launch.runs import write_job
from tests.docs.pages import PAGES, ROOT, blocks, every, spans

ACCELERATE = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SCRIPT = """
import torch
def build_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.zeros(2, 4)
"""
STANDS_FOR = {"KEY=VALUE": "mixed_precision=bf16", "KEY": "mixed_precision", "NAME": "laptop_cpu", "MODEL": "8b"}
"""What placeholders are replaced with; others name a file or a folder that is there."""
ELSEWHERE = {
    "check": "tests/e2e/test_check.py",
    "test": "tests/e2e/test_check.py",
    "tune": "tests/e2e/test_tune.py",
    "doctor --network": "tests/e2e/test_check.py",
    "estimate --exact": "tests/distributed/test_estimate.py",
}
"""What takes many seconds, or several processes, and the tests that run it."""
ASKS = "tests/cli/test_wizard_pty.py"
FINISHED = "is not running"
"""What `runs cancel` says of the runs that are there, which have ended."""


def documented() -> list[str]:
    """Command lines in blocks (after `$`, or at a line's start) and between backticks."""
    found = []
    for block in every(blocks):
        lines = block.text.replace("\\\n", " ").splitlines()
        found += [match[1] for line in lines if (match := re.match(r"\s*(?:\$ )?(fsdplaunch [a-z-].*)", line))]
    for span in every(spans):
        if match := re.search(r"(?:^|\s)(fsdplaunch [a-z-].*)", span.text):
            found.append(match[1])
    return found


def in_help() -> Iterator[str]:
    """The examples at the end of each command's help."""
    waiting = [typer.main.get_command(app)]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for text in (command.help, command.epilog):
            _, found, examples = " ".join((text or "").split()).partition("Example")
            if found:
                yield from (each.strip(" .") for each in re.findall(r"fsdplaunch .*?(?=; |\. |\.?$)", examples))


def command_lines() -> list[str]:
    """All of them, without what stands beside them: columns, comments, where output goes."""
    lines = {re.split(r"\s{3,}| > |  #", line)[0].strip() for line in (*documented(), *in_help())}
    return sorted(lines)


def words_of(line: str) -> list[str]:
    """A line's words, without `fsdplaunch` and what may be left out."""
    words = shlex.split(re.sub(r"\[[^\]]*\]", "", line), comments=True)[1:]
    return [STANDS_FOR.get(word, word) for word in words if word != "..."]


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A folder with all that the commands name, and a home."""
    home, cache = tmp_path / "home", ".cache/huggingface/accelerate"
    (home / cache).mkdir(parents=True)
    for name in ("IN", "F", "FILE", "default_config.yaml", "accelerate.yaml", f"home/{cache}/default_config.yaml"):
        (tmp_path / name).write_text(ACCELERATE)
    for name in ("train.py", "timeout.py", "SCRIPT"):
        (tmp_path / name).write_text(SCRIPT)
    for name in ("plain_lm.py", "train_lm.py"):
        shutil.copy(ROOT / "scripts/examples" / name, tmp_path / name)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "Llama-3.1-8B").mkdir()
    (tmp_path / "Llama-3.1-8B/config.json").write_text(json.dumps(LLAMA))
    for name in ("2026-01-01_000000-ID", "2026-01-01_000001-3022"):
        folder = tmp_path / "runs" / name
        for part in (folder, folder / "task0", folder / "task1"):
            for rank in range(8):
                (part / f"ranks/{rank}").mkdir(parents=True)
                (part / f"ranks/{rank}/stdout.log").write_text("step 1\n")
            (part / "result.json").write_text('{"exit_code": 0}')
        (folder / "plan.json").write_text('{"script": "train.py", "workers": 8}')
    write_job(folder, route="slurm", job="3022")
    (folder / "slurm-3022_1.out").write_text("step 1\n")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("FSDP", "ACCELERATE_", "PARALLELISM_"))]:
        monkeypatch.delenv(name)  # another test's
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    return tmp_path


def needs_model(words: list[str], folder) -> None:
    """Make what a command without an argument looks for in its folder."""
    if words == ["estimate"]:
        (folder / "Llama-3.1-8B/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def needs_checkpoint(folder) -> None:
    """Write a checkpoint at each place that a merge names."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"model": {"weight": torch.ones(4, 4)}}
    for name in ("ckpt", "checkpoints/lm/checkpoint-2", "run/checkpoint-1000", "scratch/run/checkpoint-9000"):
        dcp.save(state, checkpoint_id=folder / name / "pytorch_model_fsdp_0", no_dist=True)


def run_elsewhere(words: list[str]) -> str | None:
    """The tests that run what is not run here, or None."""
    for what, tests in ELSEWHERE.items():
        command, *options = what.split()
        if words[0] == command and all(option in words for option in options):
            return tests
    if words == ["launch"]:  # prose, not a command
        return "tests/e2e"
    asks = words[0] == "config" and "--yes" not in words and not (words[1:] and words[1].isalpha())
    return ASKS if asks else None


def parse(words: list[str]) -> None:
    """Have the command line take the words, and call nothing."""
    root = typer.main.get_command(app)
    waiting = [root]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        command.callback = lambda **_: None
    root.main(args=expanded(words), prog_name="fsdplaunch", standalone_mode=False)


def test_there_are_command_lines():
    assert len(command_lines()) > 60
    assert len(list(in_help())) > 8


@pytest.mark.parametrize("line", command_lines())
def test_command_is_run(line, scratch, capsys):
    words = [word.replace("~", str(scratch / "home")).replace("/scratch/", "scratch/") for word in words_of(line)]
    if tests := run_elsewhere(words):
        assert (ROOT / tests).exists()
        parse(words)
        return
    if words[0] == "launch" and not {"--help", "--help-all"} & set(words):
        words[1:1] = ["--dry-run"]
    if words[0] == "doctor":
        words += ["--no-torch"]
    if "--yes" not in words:  # which writes it
        (scratch / "fsdp.yaml").write_text("kubernetes: {image: train:1}\n")
    if words[0] == "merge-weights":
        needs_checkpoint(scratch)
    needs_model(words, scratch)
    status = run(words)
    said = capsys.readouterr().err
    assert status == (2 if words[:2] == ["runs", "cancel"] else 0), said
    assert words[:2] != ["runs", "cancel"] or FINISHED in said


@pytest.mark.parametrize("line", ["launch --no-such-key 1 train.py", "lunch train.py", "check --dry"])
def test_wrong_command_lines_are_found(line, scratch):
    assert run(line.split()) == 2


def shown_output() -> list[tuple[str, list[str]]]:
    """Commands whose output depends on no training, with the lines that pages show after them."""
    found = []
    for text in map(Path.read_text, PAGES):
        for match in re.finditer(
            r"^    \$ (fsdplaunch (?:config --yes$|doctor$|estimate ).*)\n((?: {4}.*\n|\n)+)", text, re.M
        ):
            lines = [line.removeprefix("    ").rstrip() for line in match[2].splitlines()]
            found.append((match[1], [line for line in lines if line.strip(" .")]))
    return found


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="the pages show a machine without a GPU")
@pytest.mark.parametrize(("command", "lines"), shown_output(), ids=[command for command, _ in shown_output()])
def test_shown_output_is_what_is_printed(command, lines, scratch, capsys):
    if "estimate" in command:  # as the page says below it
        (scratch / "fsdp.yaml").write_text("mixed_precision: bf16\nnum_machines: 2\n")
    assert run(words_of(command)) == 0
    printed = "\n".join(capsys.readouterr()).splitlines()
    if "estimate" not in command:  # of whatever machine
        own = r"\d+|\(/.*?\)|takes .*"
        lines, printed = ([re.sub(own, "0", line) for line in some] for some in (lines, printed))
    assert [line for line in lines if line not in printed] == []
