"""Numbers that nobody means, in options and in a model's config.json: one message, exit 2, at once."""

import json
import time

import pytest

from fsdplaunch.cli.app import run

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
NO_NUMBERS = ["1_0", "\u0967", "\uff19", "0x10", "ten", "", "nan", "inf", "9" * 5000, "1e999", "-1", "1.5"]
OPTIONS = [
    ("estimate", "8b", "--batch-size"),
    ("estimate", "8b", "--world-size"),
    ("estimate", "8b", "--seq-len"),
    ("runs", "--limit"),
    ("runs", "logs", "latest", "--rank"),
    ("check", "--steps"),
    ("tune", "--steps"),
    ("check", "--tolerance"),
]


def refused(capsys, *arguments: str) -> str:
    """Return what was said, at once and with exit 2."""
    start = time.process_time()
    assert run(list(arguments)) == 2, capsys.readouterr()
    assert time.process_time() - start < 5
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err) < 2000
    return said.err


@pytest.mark.parametrize("words", OPTIONS, ids=" ".join)
def test_option_takes_numbers_alone(capsys, words):
    for text in [*NO_NUMBERS, str(10**30)]:
        assert words[-1] in refused(capsys, *words[:-1], f"{words[-1]}={text}", *words[len(words) :])
    if words[-1] not in ("--rank", "--tolerance"):
        refused(capsys, *words, "0")


@pytest.mark.parametrize("text", ["0", "-1GB", "\uff11GB", "nanGB", "1e400", "9" * 400 + "TB", "1_0GB", "GB"])
@pytest.mark.parametrize(
    "words",
    [("estimate", "8b", "--gpu-memory"), ("merge-weights", "a", "b", "--max-shard-size"), ("tune", "--memory")],
)
def test_sizes_are_sizes(capsys, words, text):
    assert words[-1] in refused(capsys, *words[:-1], f"{words[-1]}={text}")


@pytest.mark.parametrize(
    "name", [name for name in LLAMA if name != "model_type"] + ["num_key_value_heads", "head_dim"]
)
def test_models_number_is_a_number(capsys, tmp_path, name):
    for value in (10**9 * 3, 10**30, 10**400, -1, 0, "64", [64], {"a": "\x1b[31m"}, True, 1.5, float("inf")):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | {name: value}))
        said = refused(capsys, "estimate", "config.json")
        assert f"{name} is " in said
        assert "\x1b" not in said


def test_blocks_are_written_out_up_to_a_limit(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 4097}))
    assert "num_hidden_layers is 4097" in refused(capsys, "estimate", "config.json")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 4096}))
    assert run(["estimate", "config.json"]) == 0


def test_what_typer_says_of_a_command_line_is_escaped(capsys):
    for words in (
        ["--x\x1b[31m"],
        ["\x1b]0;t\x07"],
        ["config", "show", "a", "b\u202e"],
        ["runs", "--limit", "\x1b"],
    ):
        assert run(words) == 2
        said = capsys.readouterr()
        assert not {"\x1b", "\x07", "\u202e"} & set(said.err + said.out)
