"""Starting a warm interpreter by hand: one that was interrupted leaves none behind."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from fsdplaunch.config.schema.config import Config
from fsdplaunch.warm import client


@pytest.fixture
def plan():
    target = SimpleNamespace(command=("-m", "fsdplaunch.runtime.bootstrap", "train.py"))
    return SimpleNamespace(config=Config(), target=target, argv=[sys.executable], env={})


def test_ctrl_c_ends_the_interpreter_that_is_importing(plan, tmp_path, monkeypatch):
    server, number = tmp_path / "server.py", tmp_path / "pid"
    server.write_text(
        f"import os, signal, time\nopen({str(number)!r}, 'w').write(str(os.getpid()))\n"
        f"os.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(client, "WARM_SERVER", server)
    monkeypatch.setattr(client, "preload_lists", lambda *_: [["torch"], []])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            client.start_server(plan, os.environ, seconds=5)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)
