"""Names from outside reach a terminal by many ways: prompts, progress, notes of the agent, lists, pages."""

import io
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest

from fsdplaunch.agent.output import OutputRelay
from fsdplaunch.cli import output
from fsdplaunch.cli.app import run
from fsdplaunch.cli.output import Output
from fsdplaunch.display_text import one_line, quoted
from fsdplaunch.wizard.questions import Choice

HOSTILE = "a\x1b]0;title\x07\u202eb\x9b2J[red]<script>alert(1)</script>\ud83d"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


def test_prompts_show_names_without_escapes(monkeypatch):
    prompts = pytest.importorskip("fsdplaunch.wizard.conversation")

    shown: dict[str, object] = {}
    monkeypatch.setattr(
        prompts.questionary, "select", lambda text, choices, **more: shown.update(t=text, c=choices)
    )
    question = mock.MagicMock()
    monkeypatch.setattr(prompts.questionary, "text", lambda text, **more: shown.update(t=text, **more) or question)
    monkeypatch.setattr(prompts.Prompts, "_ask", lambda *_, **__: "answer")
    monkeypatch.setattr(prompts, "print_formatted_text", lambda words, **_: shown.update(kept=words))
    asker = prompts.Prompts.__new__(prompts.Prompts)
    asker._output = type("Screen", (), {"get_size": lambda _: type("Size", (), {"columns": 80})()})()
    asker.select(HOSTILE, [Choice(value="v", title=HOSTILE, consequence=HOSTILE, detail=HOSTILE * 3)])
    (choice,) = shown["c"]
    assert not any(STEERS.search(str(text)) for text in (shown["t"], choice.title, choice.description))
    assert choice.value == "v"
    asker.line(HOSTILE, remark=HOSTILE, problem=lambda _: HOSTILE)
    assert not STEERS.search(str(shown["t"]) + str(shown["instruction"]) + str(shown["validate"]("x")))
    assert not any(STEERS.search(text) for _, text in shown["kept"])


def test_progress_shows_names_as_they_are(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(output, "LINE_SECONDS", 0)
    monkeypatch.setattr(output, "LIVE_SECONDS", 0)
    for is_terminal in (False, True):
        monkeypatch.setattr(screen, "isatty", lambda is_terminal=is_terminal: is_terminal)
        with output.byte_progress(Output()) as update:
            for item in (HOSTILE, "[/red]", "[link=file:///etc]x", "a\nb"):
                update("copy", 1, 2, item)
    assert "copy 50%" in screen.getvalue()
    assert not re.search("[\x07\u202e\x9b]|\x1b\\]", screen.getvalue())


def test_notes_of_the_agent_are_safe():
    ends = os.pipe()
    OutputRelay({"stderr": ends[1], "stdout": ends[1]}).say(HOSTILE)
    os.close(ends[1])
    with os.fdopen(ends[0], "rb") as said:
        text = said.read().decode()
    assert text.startswith("fsdplaunch: a\\x1b]0;title")
    assert text.endswith("\n")
    assert not STEERS.search(text[:-1])


def test_list_of_runs_shows_what_folders_and_files_say_on_one_line_each(capsys, tmp_path):
    folder = tmp_path / "evil\x1b[31m\nrun"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"script": HOSTILE}))
    (folder / "result.json").write_text(json.dumps({"exit_code": 1, "stopped_by": HOSTILE}))
    assert run(["runs", "--log-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 2
    assert not STEERS.search(said.replace("\n", ""))


def test_one_line_and_quoted_are_one_line():
    for text in (HOSTILE, "a\nb\r\nc", "\n" * 99, "x" * 999):
        assert "\n" not in one_line(text) + quoted(text)
        assert not STEERS.search(one_line(text) + quoted(text))
    assert len(quoted("x" * 999)) < 100
    assert Path(one_line("/a b/c")) == Path("/a b/c")
