"""What is said of a search that has ended: table, words, JSON, YAML."""

import json
from dataclasses import replace

import pytest

from fsdplaunch.config.load import stack
from fsdplaunch.config.schema.config import keys_by_path
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.tune.result import closing_lines, table_lines, winner_text
from fsdplaunch.tune.space import Candidate

RESHARD = ("fsdp_config", "fsdp_reshard_after_forward")


def test_table_is_sorted_by_speed_and_marks_the_best(result):
    lines = table_lines(result.rows, limit=result.limit, kept=result.kept)
    assert lines[1].startswith("* reshard_after_forward=false")
    assert "150.0 ms" in lines[1]
    assert "150.0 MiB of 200.0 MiB" in lines[1]
    assert lines[2].endswith("slower")
    assert lines[1].count("#") == 12
    assert lines[2].count("#") == 16
    assert lines[3].split("  ")[-1] == "failed: rank 0: <ValueError>"


def test_closing_words_say_how_much_and_how_clear(result):
    text = "\n".join(closing_lines(result))
    assert "reshard_after_forward=false takes 25 % less time, clear after 2 rounds in turn" in text
    assert "best: reshard_after_forward=false, 1.33 times the speed of yours" in text
    assert "fsdp_config.fsdp_reshard_after_forward: false  25 % less time per step by itself" in text


def test_closing_words_without_a_winner_and_when_stopped(result):
    assert "no candidate fits" in list(closing_lines(replace(result, kept=None)))
    stopped = replace(result, kept=Candidate(), is_complete=False)
    assert "so far, yours is the one to keep: nothing tried is clearly faster" in list(closing_lines(stopped))


def test_data_is_plain(result):
    data = json.loads(json.dumps(result.to_dict()))
    assert data["best"] == {"fsdp_config.fsdp_reshard_after_forward": False}
    assert data["speed"] == pytest.approx(4 / 3)
    assert data["gains"][0]["saves"] == pytest.approx(0.25)
    assert [row["state"] for row in data["candidates"]] == ["slower", "measured", "failed"]
    assert data["comparisons"][0]["rounds"] == [[0.15, 0.2]] * 2


def test_written_file_keeps_the_users_text_and_says_what_each_key_gained(result):
    old = "# mine\nfsdp_config:\n  fsdp_version: 2  # two\n"
    spec = keys_by_path()[RESHARD]
    config = stack(read_text(old, "fsdp.yaml"), overrides=["fsdp_reshard_after_forward=false"]).config
    text = winner_text(result, config, old=old, changes=[(spec, False)])
    assert text.startswith("# measured by fsdplaunch tune train.py: 150.0 ms per step on 2 workers, 1.33 times")
    assert "# mine" in text
    again = winner_text(result, config, old=text, changes=[(spec, False)])
    assert again == text
    assert "# tune: fsdp_config.fsdp_reshard_after_forward: false  25 % less time per step by itself\n" in text
    assert stack(read_text(text, "new.yaml")).config == config


def test_new_file_says_the_configuration(result):
    config = stack(read_text("", "fsdp.yaml"), overrides=["fsdp_reshard_after_forward=false"]).config
    text = winner_text(result, config, old=None, changes=())
    assert "25 % less time per step by itself" in text
    assert stack(read_text(text, "new.yaml")).config == config
