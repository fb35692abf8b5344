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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fsdplaunch.cli.app import run
from fsdplaunch.config.schema.config import all_keys
from fsdplaunch.display_text import printable
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


Content = bytes | Callable[[Path], None]
Files = Mapping[str, Content]


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: any key with any value, any option with any value, any number of a model with any value."""
    keys = [spec.dotted for spec in all_keys()]
    for number in range(count or COUNT):
        text = chance.choice(_VALUES)
        name, words, files = f"{number}: {text[:30]!r}", [], {}
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
                words = ["estimate", "config.json"]
                files = {"config.json": json.dumps(_LLAMA | {key: value}).encode()}
        yield Case(name=f"{name} in {words[:4]}", attack=lambda w=words, f=files: give(w, f))


def _names() -> set[str]:
    return {path.name for path in Path().iterdir()}


class _Screen(io.TextIOWrapper):
    """What a command prints on: a terminal without colours, or a pipe."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def give(words: list[str], files: Files | None = None, *, on_terminal: bool = False) -> str:
    """Run a command line in an empty folder, and raise unless it ends with a status and words of ours.

    Args:
        words: The command line.
        files: What stands in the folder, by name: bytes, or what makes something else there.
        on_terminal: It prints on a terminal, as far as it can tell.

    Returns:
        What it said.
    """
    before, said = Path.cwd(), _Screen(is_terminal=on_terminal)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name, content in {"train.py": b"pass\n", **(files or {})}.items():
                put(Path(name), content)
            names, start = _names(), time.monotonic()
            os.environ["NO_COLOR"] = "1"
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                status = run(words)
            taken, written = time.monotonic() - start, _names() - names
        finally:
            os.chdir(before)
    said.flush()
    text = said.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
    assert status in (0, 1, 2, 3), status
    assert "this is a bug" not in text, text[-500:]
    assert "Traceback" not in text, text[-500:]
    assert printable(text) == text, text[-500:]
    assert len(text) < MOST_CHARACTERS, len(text)
    assert taken < MOST_SECONDS, taken
    assert not written, written
    return text


def put(path: Path, content: Content) -> None:
    """Put bytes, or what else is to stand there, at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
