"""Config -> YAML -> Config and Config -> environment -> Config are identities over all valid configurations."""

import os
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdplaunch.config.convert import to_fsdp2
from fsdplaunch.config.environment import decode, encode
from fsdplaunch.config.load import check
from fsdplaunch.config.render import render, set_keys, values_to_write
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.rules.base import NOTES, RULES, find, rule_context
from fsdplaunch.config.schema import kinds as v
from fsdplaunch.config.schema.config import (
    Config,
    PrecisionSection,
    all_keys,
    build_config,
    keys_by_path,
    value_at,
)
from fsdplaunch.config.schema.kinds import MOST_SECONDS
from fsdplaunch.config.schema.sharding_sections import XLA_SETTINGS
from fsdplaunch.config.yaml_text import flow_text, plain_value
from fsdplaunch.errors import UsageError
from tests.yaml_config import config_of

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20).filter(
    str.strip
)
WORDS = st.text(string.ascii_letters + string.digits + "_.", min_size=1, max_size=10)
MODULES = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8)
JSON = st.recursive(
    st.booleans() | st.integers(-9, 9) | TEXT, lambda inner: st.lists(inner, max_size=2), max_leaves=4
)

RANKS = st.lists(st.integers(0, 20), min_size=1, max_size=4).map(lambda ranks: ",".join(map(str, ranks)))

BY_KIND = {
    id(v.FLAG): st.booleans(),
    id(v.WHOLE): st.integers(0, 2**40),
    id(v.COUNT): st.integers(1, 2**40),
    id(v.PORT): st.integers(0, 65535),
    id(v.SECONDS): st.floats(min_value=0, max_value=MOST_SECONDS, exclude_min=True),
    id(v.WAIT): st.floats(min_value=0, max_value=MOST_SECONDS),
    id(v.SETTINGS): st.dictionaries(WORDS.filter(str.isidentifier), TEXT, max_size=3),
    id(v.METRICS): st.fixed_dictionaries(
        {}, optional={"jsonl": TEXT, "tensorboard": TEXT, "prometheus": st.integers(1, v.MAX_PORT).map(str)}
    ),
    id(v.STREAMS): st.sampled_from(["0", "1", "2", "3", "0:3", "0:1,1:2"]),
    id(v.SIGNALS): st.sampled_from([("SIGTERM",), ("SIGINT", "SIGUSR1"), ("SIGHUP", "SIGQUIT", "SIGUSR2")]),
    id(v.TEXT): TEXT,
    id(v.PATTERN): st.sampled_from(
        [r".*\.norm", "lm_head", r"layers\.\d+\.(a|b)", "no", "1e5", "[ab]{2}", "(?:a)|(?:b.*)"]
    ),
    id(v.NAMES): st.lists(WORDS, max_size=3).map(tuple),
    id(v.HOSTS): st.lists(WORDS, max_size=3).map(tuple),
    id(v.LINES): st.lists(TEXT, max_size=3).map(tuple),
    id(v.TABLE): st.dictionaries(WORDS, JSON, max_size=3),
    id(XLA_SETTINGS): st.fixed_dictionaries(
        {},
        optional={
            "compute_dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
            "flatten_parameters": st.booleans(),
            "reduce_scatter_bucket_size_mb": st.integers(0, 99),
            "sharding_groups": st.lists(st.lists(st.integers(0, 7), max_size=2), max_size=2),
            "_debug_msg": st.just("words of one's own"),
        },
    ),
    id(v.VARIABLES): st.dictionaries(WORDS.filter(str.isidentifier), st.just("") | TEXT, max_size=3),
    id(v.PLAN): st.dictionaries(WORDS.map(str.strip).filter(bool), WORDS.map(str.strip).filter(bool), max_size=3),
    id(v.RANKS): st.just("all") | RANKS,
    id(v.DEVICES): st.just("all") | RANKS | st.just("GPU-1a2b,MIG-3c"),
    id(v.MODULES): st.lists(MODULES.filter(str.isidentifier), max_size=3).map(tuple),
    id(v.THREE_FLAGS): st.tuples(st.booleans(), st.booleans(), st.booleans()),
    id(v.NODE_RANGE): st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda pair: f"{pair[0]}:{sum(pair)}"),
    id(v.ENDPOINT): st.sampled_from(["10.0.0.1:29500", "node-0:0", "[fe80::1]:400"]),
    id(v.WORKERS): st.just("auto") | st.integers(1, 64),
    id(v.LOCAL_WORKERS): st.sampled_from(["auto", "gpu", "cpu"]) | st.integers(1, 64),
    id(v.MESH_SIZE): st.just(-1) | st.integers(1, 16),
    id(v.RESHARD): st.booleans() | st.integers(2, 8) | st.sampled_from(v.STRATEGY.choices),
}


def values_of(spec):
    """Canonical values of a key."""
    if spec.key.kind.choices and id(spec.key.kind) not in BY_KIND:
        return st.sampled_from([spec.key.kind.parse(choice) for choice in spec.key.kind.choices])
    return BY_KIND[id(spec.key.kind)]


@st.composite
def configs(draw):
    """Configs that pass every rule: any keys, with those that break one, or shard nothing, taken out again."""
    chosen = draw(st.lists(st.sampled_from(all_keys()), unique_by=lambda spec: spec.path, max_size=12))
    said = {spec.path: draw(values_of(spec)) for spec in chosen}
    config = build_config(said)
    while violations := [violation for _, violation in find(RULES, rule_context(config))] + [
        violation for name, violation in find(NOTES, rule_context(config)) if name == "nothing-sharded"
    ]:
        for path in {path for violation in violations for path in violation.about}:
            said.pop(path, None)
        config = build_config(said)
    return config


SLOW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@SLOW
@given(config=configs())
def test_a_rendered_file_reads_as_the_same_configuration(config):
    assert check(config) == ()
    resolved = resolve(config)
    assert resolve(resolved) == resolved
    assert config_of(text=render(config)) == resolved
    assert config_of(text=render(config, full=True)) == resolved
    assert config_of(text=render(config, comments=False)) == resolved


@SLOW
@given(config=configs())
def test_the_environment_gives_the_same_configuration_back(config):
    resolved = resolve(config)
    environ = encode(resolved)
    os.environ.update(environ)  # the real one, which refuses what no process could be given
    try:
        assert decode() == resolved
    finally:
        for name in environ:
            del os.environ[name]


@SLOW
@given(config=configs())
def test_keys_set_one_by_one_give_the_same_file(config):
    resolved = resolve(config)
    text = "# mine\n"
    for path, value in values_to_write(resolved).items():
        text = set_keys(text, [(keys_by_path()[path], value)])
    assert text.startswith("# mine\n")
    assert config_of(text=text) == resolved


@SLOW
@given(config=configs())
def test_overrides_say_what_a_file_says(config):
    resolved = resolve(config)
    overrides = [
        f"{'.'.join(path)}={flow_text(plain_value(keys_by_path()[path], value))}"
        for path, value in values_to_write(resolved).items()
    ]
    assert config_of(*overrides) == resolved


@SLOW
@given(config=configs())
def test_a_converted_file_shards_the_same_way(config):
    resolved = resolve(config)
    if resolved.distributed_type != "FSDP":
        with pytest.raises(UsageError, match="shards nothing"):
            to_fsdp2(render(config))
        return
    converted = config_of(text=to_fsdp2(render(config))[0])
    assert converted.fsdp_config.fsdp_version == 2
    kept = ("fsdp_offload_params", "fsdp_auto_wrap_policy", "fsdp_min_num_params", "fsdp_ignored_modules")
    for name in kept:
        assert value_at(converted, ("fsdp_config", name)) == value_at(resolved, ("fsdp_config", name))


@settings(max_examples=250, deadline=None)
@given(spec=st.sampled_from(all_keys()), data=st.data())
def test_every_value_reaches_the_worker(spec, data):
    """Each allowed value -> environment -> schema in the worker: the same value."""
    value = data.draw(values_of(spec))
    config = resolve(build_config({spec.path: value}))
    environ = encode(config)
    assert all(text and "\0" not in text for text in environ.values())
    assert decode(environ) == config


def test_a_number_format_of_version_1_needs_no_sharding_key_where_nothing_is_sharded():
    config = resolve(Config(distributed_type="NO", precision=PrecisionSection(buffer="fp32")))
    written = {path[0] for path in values_to_write(config)}
    assert written == {"distributed_type", "num_processes", "mixed_precision", "precision"}
    assert config_of(text=render(config)) == config
