"""The command on a real terminal: a pseudo-terminal, the keys a person presses, the file that results."""

import os
import sys
from pathlib import Path

import pexpect
import pytest

from fsdplaunch.config.load import load_config

pytestmark = pytest.mark.timeout(120)

ENTER, DOWN, BACK_TAB = "\r", "\x1b[B", "\x1b[Z"
PATIENCE = 30


@pytest.fixture
def start():
    """Start `fsdplaunch config` in an empty folder; returns the running program."""
    environ = {name: value for name, value in os.environ.items() if name != "CI"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    children = []

    def run(*arguments):
        child = pexpect.spawn(
            sys.executable,
            ["-m", "fsdplaunch", "config", *arguments],
            env=environ,
            dimensions=(40, 100),
            encoding="utf-8",
            timeout=PATIENCE,
        )
        child.delaybeforesend = 0.1
        children.append(child)
        return child

    yield run
    for child in children:
        child.close(force=True)


def ended(child):
    """The exit status once the program has ended."""
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def test_wizard_on_a_terminal_goes_back_and_writes_what_was_answered(start):
    child = start()
    child.expect_exact("This machine")
    child.expect_exact("Where will this run?")
    child.send(ENTER)
    child.expect_exact("How many workers on each node?")
    child.send(BACK_TAB)
    child.expect_exact("Where will this run?")
    child.send(ENTER)
    child.expect_exact("How many workers on each node?")
    child.send("999" + ENTER)
    child.expect_exact("Is that intended?")
    child.send(DOWN + ENTER)
    child.expect_exact("Model folder, or its size")
    child.send("124m" + ENTER)
    child.expect_exact("(a llama of 124m)")
    for question in ("What is sharded?", "Which dtype computes?", "What is one unit?"):
        child.expect_exact(question)
        child.send(ENTER)
    child.expect_exact("Any other setting?")
    child.send(ENTER)
    child.expect_exact("fsdp.yaml (new)")
    child.expect_exact("Write it?")
    child.send(ENTER)
    child.expect_exact("Wrote fsdp.yaml")
    child.expect(r"fsdplaunch config --where cpu --workers-per-node 999 --model 124m [^\r\n]* --yes")
    assert ended(child) == 0
    config = load_config(Path("fsdp.yaml"), environ={}).config
    assert (config.use_cpu, config.num_processes, config.fsdp_config.fsdp_version) == (True, 999, 2)


def test_wizard_ctrl_c_leaves_nothing_and_no_input_never_prompts(start):
    child = start("--no-input")
    child.expect_exact("cannot answer without asking: Where will this run?")
    assert ended(child) == 2
    child = start()
    child.expect_exact("Where will this run?")
    child.send(ENTER)
    child.expect_exact("How many workers on each node?")
    child.sendintr()
    child.expect_exact("Nothing was written.")
    assert ended(child) == 130
    assert list(Path().iterdir()) == []
