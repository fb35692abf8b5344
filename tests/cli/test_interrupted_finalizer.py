"""Ctrl-C that comes while Python runs a finalizer, where it raises nothing."""

import signal
import sys
import time

import pytest

from fsdplaunch.cli.app import _interrupt_again


class Interrupted:
    """Whose finalizer a Ctrl-C meets."""

    def __del__(self) -> None:
        raise KeyboardInterrupt


def test_it_ends_the_command_all_the_same_and_is_not_shown(monkeypatch, capfd):
    monkeypatch.setattr(sys, "unraisablehook", _interrupt_again)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Interrupted()
            for _ in range(1000):  # one long sleep would not be ended
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr() == ("", "")
