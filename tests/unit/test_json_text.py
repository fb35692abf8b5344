"""JSON of others: what a text may ask for in memory, and how deep it may go."""

import json
import random
import subprocess
import sys

import pytest

from fsdplaunch.files import JsonError, parse_json

MEASURES = """
from fsdplaunch.files import SPARE, TIMES, JsonError, parse_json
def memory():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
deep = "[" * 400 + "]" * 400 + ","
for part in ("[],", "{},", '{"":0},', "[0],", '"ab",', "1.5,", "999,", '{"a":[{}]},', '"\\u20ac",', deep):
    text = ("[" + part * (6_000_000 // len(part)) + "0]").encode()
    before = memory()
    try:
        value = parse_json(text)
    except JsonError as problem:
        assert "memory" in str(problem), problem
        value = None
    assert memory() - before < TIMES * len(text) + SPARE, (part[:20], memory() - before, len(text))
    del value
keys = ("{" + ",".join(f'"{n:x}":0' for n in range(500_000)) + "}").encode()
before = memory()
assert len(parse_json(keys)) == 500_000
assert memory() - before < TIMES * len(keys) + SPARE
"""


def test_no_text_takes_more_memory_than_the_budget():
    subprocess.run([sys.executable, "-c", MEASURES], check=True, timeout=120)


def test_dense_text_is_refused_before_it_is_read():
    for part in ("[],", "{},", '{"":0},', '{"a":[{"b":{}}]},', "[[[[]]]],"):
        with pytest.raises(JsonError, match="more than 20 times its size and 64 MiB of memory"):
            parse_json("[" + part * (16_000_000 // len(part)) + "0]")


def test_files_that_are_as_dense_as_real_ones_get_are_read():
    header = {f"l{n}.w": {"dtype": "F32", "shape": [n, 4], "data_offsets": [n, n + 16]} for n in range(20_000)}
    index = {f"model.layers.{n}.weight": "model-00001-of-00002.safetensors" for n in range(20_000)}
    for value in (header, {"weight_map": index}):
        assert parse_json(json.dumps(value, separators=(",", ":")).encode()) == value


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"[[" * 9999 + b"]]" * 9999]
)
def test_deep_nesting_is_an_error_and_no_crash(text):
    with pytest.raises(JsonError):
        parse_json(text)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"nope", b"1" * 5000, b"{'a': 1}", b"[1,]", "\ud800"])
def test_what_is_no_json_is_said(text):
    with pytest.raises(JsonError):
        parse_json(text)


def test_any_damage_to_a_text_is_an_error_or_a_value():
    chance, text = random.Random(5), bytearray(json.dumps({"a": [1, 2.5, None, {"b": "c" * 9}]}).encode())
    for _ in range(2000):
        bad = bytearray(text)
        for _ in range(chance.randrange(1, 4)):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        try:
            parse_json(bytes(bad))
        except JsonError:
            continue
