"""The decoder of messages: what is right passes unchanged, and whatever differs is none."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdplaunch.launch.coordination.protocol import TO_COORDINATOR, TO_NODE, ProtocolError, decode
from scripts.campaigns.attack_classes.messages import EXAMPLES

KINDS = [(kind, kinds) for kinds in (TO_COORDINATOR, TO_NODE) for kind in kinds]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.parametrize(("kind", "kinds"), KINDS)
def test_right_message_passes_unchanged(kind, kinds):
    message = {"kind": kind, **EXAMPLES[kind]}
    assert decode(json.dumps(message).encode(), kinds) == message


@pytest.mark.parametrize(("kind", "kinds"), [pair for pair in KINDS if EXAMPLES[pair[0]]])
def test_message_without_one_of_its_fields_is_none(kind, kinds):
    for name in EXAMPLES[kind]:
        left = {key: value for key, value in EXAMPLES[kind].items() if key != name}
        with pytest.raises(ProtocolError):
            decode(json.dumps({"kind": kind, **left}).encode(), kinds)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"null",
        b"[]",
        b"{}",
        b'{"kind": "ping", "x": NaN}',
        b"\xff",
        b"1" * 9999,
    ],
)
def test_line_that_is_no_message_is_none(line):
    with pytest.raises(ProtocolError):
        decode(line, TO_COORDINATOR)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("stop", {"number": True}),
        ("stop", {"number": -1}),
        ("stop", {"count": 2**70}),
        ("outcome", {"outcome": {"status": "0", "stopped_by": None, "error": None, "attempt": None}}),
        ("outcome", {"outcome": {"status": 0, "stopped_by": None, "error": None, "attempt": {"workers": [{}]}}}),
        ("hello", {"time_ns": 1.5}),
        ("reached", {"why_not": None}),
        *(
            ("steps", {"ranks": [{**EXAMPLES["steps"]["ranks"][0], **change}]})
            for change in (
                {"rank": -1},
                {"made": 1.5},
                {"total": -1},
                {"ended": None},
                {"steps": [[None] * 9]},
                {"steps": [[1, 2]]},
                {"steps": 5},
            )
        ),
    ],
)
def test_wrong_type_is_none(kind, change):
    with pytest.raises(ProtocolError):
        decode(json.dumps({"kind": kind, **EXAMPLES[kind], **change}).encode(), TO_COORDINATOR)


@given(value=JSON)
def test_any_json_is_a_message_or_none(value):
    for kinds in (TO_COORDINATOR, TO_NODE):
        with suppress(ProtocolError):
            assert decode(json.dumps(value).encode(), kinds)["kind"] in kinds
