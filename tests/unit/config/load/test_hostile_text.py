"""No text, however broken, makes anything but a configuration or a list of problems."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import render, set_keys
from fsdplaunch.config.schema.config import keys_by_path
from fsdplaunch.errors import UsageError
from tests.yaml_config import loaded as read

WORDS = ["fsdp_config:", "launch:", "num_processes: 2", "  fsdp_version: 1", "  env: {A: b}", "fsdp_version"]
MARKS = ["  ", "\n", "\n", "\n", "\t", "- ", ": ", *"[]{},'\"|", "# c", "? ", ">-", "---"]
ODDITIES = [
    "&a ",
    "*a",
    "<<: *a",
    "!!str ",
    "!x ",
    "%YAML 1.2",
    "\ufeff",
    "\0",
    "\x85",
    "\u2028",
    "1e999",
    "0x",
    "null",
]
FRAGMENTS = [*WORDS, *MARKS, *ODDITIES]
OVERRIDES = ["version=", "env={", "launch.env.=x", "launch.env", "a.b.c=1"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join) | st.text(max_size=60))
def test_no_text_makes_anything_but_a_configuration_or_problems(text):
    try:
        config = read(text).config
    except ConfigError as error:
        assert error.problems
        assert all(problem.place is not None and problem.message for problem in error.problems)
    else:
        assert read(render(config)).config == config


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join))
def test_setting_a_key_changes_that_key_or_is_refused(text):
    spec = keys_by_path()["fsdp_config", "fsdp_offload_params"]
    try:
        before = read(text).config
        changed = set_keys(text, [(spec, True)])
    except (ConfigError, UsageError):
        return
    after = read(changed).config
    assert after.fsdp_config.fsdp_offload_params is True
    assert replace(after.fsdp_config, fsdp_offload_params=False) == replace(
        before.fsdp_config, fsdp_offload_params=False
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=20) | st.sampled_from(OVERRIDES)))
def test_no_override_makes_anything_but_a_configuration_or_problems(overrides):
    try:
        read("", overrides=overrides)
    except ConfigError as error:
        assert error.problems
