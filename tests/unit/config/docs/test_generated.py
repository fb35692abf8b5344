"""What is generated from the schema is in step with it: reference, JSON Schema, presets, explanations."""

import json
import runpy
from pathlib import Path

import jsonschema
import pytest

from fsdplaunch.config.docs import describe, explain, json_schema, list_keys
from fsdplaunch.config.load import load_config
from fsdplaunch.config.render import find_preset, preset_files, preset_summary, render
from fsdplaunch.config.schema.config import all_keys, keys_by_path
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.errors import UsageError
from tests.yaml_config import loaded

ROOT = Path(__file__).parents[4]


def data(text):
    read = read_text(text, "x")
    return {entry.name: read.value(entry.node) for entry in read.entries(read.root)}


def errors(instance, draft=jsonschema.Draft202012Validator):
    return [error.message for error in draft(json_schema()).iter_errors(instance)]


@pytest.mark.parametrize(
    "name",
    [
        *("configs/REFERENCE.md", "configs/fsdp.schema.json", "docs/migrating-from-accelerate.md"),
        *("README.md", "docs/watching.md"),
    ],
)
def test_what_is_generated_is_in_step(name):
    pages = runpy.run_path(str(ROOT / "scripts" / "generated_pages"))["pages"]
    assert (ROOT / name).read_text() == dict(pages())[ROOT / name], "run scripts/generated_pages"


def test_the_json_schema_is_one_for_new_and_old_readers():
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.Draft7Validator.check_schema(json_schema())
    assert "$ref" not in json.dumps(json_schema())


@pytest.mark.parametrize("draft", [jsonschema.Draft202012Validator, jsonschema.Draft7Validator])
def test_the_json_schema_takes_what_the_loader_takes(draft):
    for instance in (
        data((ROOT / "tests" / "cases" / "transformers_guide.yaml").read_text()),
        {"fsdp_config": {"version": 2, "fsdp_wrap_policy": "SIZE_BASED_WRAP", "min_num_param": 5}},
        {"num_processes": "auto", "launch": {"env": {"A": 1}}, "precision": None},
    ):
        assert errors(instance, draft) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_process": 2},
        {"num_processes": "many"},
        {"fsdp_config": {"fsdp_version": 3}},
        {"fsdp_config": {"fsdp_sharding_strategy": "FULL"}},
        {"fsdp_config": []},
        {"launch": {"max_restarts": -1}},
        {"main_process_port": 70000},
    ],
)
def test_the_json_schema_refuses_what_the_loader_refuses(wrong):
    assert errors(wrong)
    assert errors(wrong, jsonschema.Draft7Validator)


@pytest.mark.parametrize("preset", preset_files().values(), ids=lambda preset: preset.stem)
def test_a_preset_is_valid_and_says_what_it_is(preset):
    found = loaded(preset.read_text())
    assert found.notes == ()
    assert errors(data(preset.read_text())) == []
    assert found.origins["fsdp_config", "fsdp_version"].layer == "file"
    assert preset_summary(preset).endswith(".")
    assert loaded(render(found.config)).config == found.config


def test_presets_are_found_by_name_and_near_misses_are_named():
    names = {path.name for path in (ROOT / "configs").iterdir()}
    assert names == {path.name for path in preset_files().values()} | {"REFERENCE.md", "fsdp.schema.json"}
    assert find_preset("single-node").stem == "single_node"
    assert find_preset("single_node.yaml").name == "single_node.yaml"
    with pytest.raises(UsageError) as caught:
        find_preset("single_nod")
    assert caught.value.hint == "did you mean single_node?"


def test_explain_tells_everything_about_a_key(tmp_path):
    (tmp_path / "fsdp.yaml").write_text("fsdp_config:\n  fsdp_backward_prefetch: BACKWARD_POST\n")
    loaded = load_config(environ={}, cwd=tmp_path)
    assert explain(keys_by_path()["fsdp_config", "fsdp_backward_prefetch"], loaded) == (
        "fsdp_config.fsdp_backward_prefetch    default: left out    yours: BACKWARD_POST (fsdp.yaml:2)\n"
        "  When the next unit's parameters are gathered in backward. BACKWARD_PRE (1): before the current\n"
        "  gradients are computed. BACKWARD_POST (2): after. NO_PREFETCH (3): not ahead. Left out under\n"
        "  FSDP1, BACKWARD_PRE.\n"
        "  values    one of BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH\n"
        "  env       FSDP_BACKWARD_PREFETCH\n"
        "  only      FSDP1\n"
        "  also      fsdp_backward_prefetch_policy"
    )
    said = describe(keys_by_path()["num_machines",], loaded)
    assert (said["value"], said["origin"], said["default"]) == (1, "default", 1)
    json.dumps([describe(spec, loaded) for spec in all_keys()])


def test_every_key_can_be_explained():
    listed = list_keys()
    for spec in all_keys():
        assert spec.name in explain(spec)
        assert (f"  {spec.name} " in listed) is not spec.key.noise
