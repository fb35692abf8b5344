"""Ctrl-C in the first moments of a command: no traceback, nothing written, nothing left."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.campaigns.attack_classes.kills import _COMMANDS, interrupt

EACH = 2


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda words: words[0])
def test_ctrl_c_at_any_moment_is_quiet(command):
    chance = random.Random(command[0])
    moments = [(number + chance.random()) * 0.4 / EACH for number in range(EACH)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(interrupt, command, moment) for moment in moments]:
            done.result()
