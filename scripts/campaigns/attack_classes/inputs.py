"""Command lines, values of keys and JSON files that nobody means well: one message, a status of ours, no file.

Everything runs in this process, so that hundreds take seconds; its memory is limited meanwhile.
"""

import contextlib
import io
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fsdplaunch.cli.app import run
from fsdplaunch.config.schema.walk import all_keys
from fsdplaunch.terminal_text import printable
from scripts.campaigns.attack_classes.case import Case

COUNT = 400
MOST_SECONDS = 10.0
MOST_CHARACTERS = 60_000
_VALUES = [
    *(
        "1_0",
        "\u0967",
        "\uff19",
        "-1",
        "0",
        str(10**30),
        "1e400",
        "9" * 5000,
        "nan",
        "1e18",
        "null",
        "''",
        "\udcff",
    ),
    *(
        "\x1b[31mx",
        "\u202ex",
        "a\nb",
        "../../x",
        "$(touch x)",
        "x\"y'z`;touch x",
        "-oProxyCommand=touch x",
        "--all",
    ),
    *("[", "{a: 1}", "[[[[1]]]]", "[" * 3000, "!!python/object/apply:os.system ['touch x']", "&a [*a]", "%s%n{0}"),
]
_COMMANDS = (
    ["estimate", "8b", "--batch-size"],
    ["estimate", "8b", "--world-size"],
    ["estimate", "8b", "--seq-len"],
    ["estimate", "8b", "--gpu-memory"],
    ["merge-weights", "ck", "out", "--max-shard-size"],
    ["merge-weights", "ck", "out", "--rename"],
    ["runs", "--limit"],
    ["runs", "logs", "latest", "--rank"],
    ["config", "show", "-c"],
    ["estimate"],
    ["runs", "logs"],
)
_LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_LLAMA |= {"num_attention_heads": 4, "vocab_size": 100}


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: any key with any value, any option with any value, any number of a model with any value."""
    keys = [spec.dotted for spec in all_keys()]
    for number in range(count or COUNT):
        text = chance.choice(_VALUES)
        name, words, config = f"{number}: {text[:30]!r}", [], None
        match chance.choice(["key", "key", "plan", "option", "model"]):
            case "key":
                words = ["config", "show", "--set", f"{chance.choice(keys)}={text}"]
            case "plan":
                words = ["launch", "--dry-run", "--set", f"{chance.choice(keys)}={text}", "train.py"]
            case "option":
                words = [*chance.choice(_COMMANDS), text]
            case "model":
                key = chance.choice([*_LLAMA, "head_dim", "num_key_value_heads", "architectures", "dtype"])
                value = chance.choice([text, 10**30, -1, 0, [1] * 9, {"a": {}}, True, 1.5, float("inf"), None])
                words, config = ["estimate", "config.json"], json.dumps(_LLAMA | {key: value})
        yield Case(name=f"{name} in {words[:4]}", attack=lambda w=words, c=config: give(w, c))


def _names() -> set[str]:
    return {path.name for path in Path().iterdir()}


def give(words: list[str], config: str | None) -> None:
    """Run a command line in an empty folder, and raise unless it ends with a status and words of ours."""
    before, said = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("train.py").write_text("pass\n")
            if config is not None:
                Path("config.json").write_text(config)
            names, start = _names(), time.monotonic()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                status = run(words)
            taken, written = time.monotonic() - start, _names() - names
        finally:
            os.chdir(before)
    text = said.getvalue()
    assert status in (0, 1, 2, 3), status
    assert "this is a bug" not in text, text[-500:]
    assert "Traceback" not in text, text[-500:]
    assert printable(text) == text, text[-500:]
    assert len(text) < MOST_CHARACTERS, len(text)
    assert taken < MOST_SECONDS, taken
    assert not written, written
