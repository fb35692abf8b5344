"""The block for a bug report holds no secrets, names or addresses."""

import pytest

from fsdplaunch.doctor.facts import redact


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HF_TOKEN=hf_abcdefghij", "HF_TOKEN=***"),
        ('{"WANDB_API_KEY": "abc def", "X": "1"}', '{"WANDB_API_KEY": ***, "X": "1"}'),
        ("git clone https://bob:pw@host/x", "git clone https://***@host/x"),
        ("saw ghp_0123456789abcdef there", "saw *** there"),
        ("/home/alice/run and /Users/bob/x", "/home/USER/run and /Users/USER/x"),
        ("alice on gpu-01 at 10.1.2.3, alice2", "USER on HOST at ADDRESS, alice2"),
        ("127.0.0.1 and torch 2.13.0", "127.0.0.1 and torch 2.13.0"),
    ],
)
def test_what_tells_too_much_is_replaced(text, expected):
    assert redact(text, users=["alice"], hosts=["gpu-01"]) == expected
