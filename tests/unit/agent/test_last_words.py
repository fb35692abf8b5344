"""What is kept of a worker's last words."""

from pathlib import Path

import fsdplaunch
from fsdplaunch.agent.worker_group import last_words

PACKAGE = Path(fsdplaunch.__file__).parent
CRASH = [
    "training",
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  op.preamble.length <= op.nbytes. 20 vs 10",
    "Fatal Python error: Aborted",
    "",
    "Thread 0x01 (most recent call first):",
    f'  File "{PACKAGE}/runtime/bootstrap.py", line 5 in _serve',
    '  File "/home/a/.venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 9 in backward',
    '  File "/home/a/train.py", line 14 in step',
    '  File "/home/a/train.py", line 30 in <module>',
    '  File "<frozen runpy>", line 88 in _run_code',
    "",
    "Extension modules: numpy (total: 1)",
]


def test_the_end_is_kept():
    assert last_words([str(number) for number in range(40)], most=3) == ["37", "38", "39"]


def test_of_a_crash_what_was_said_and_the_scripts_lines_are_kept():
    assert last_words(CRASH) == [*CRASH[1:4], *CRASH[8:10]]
