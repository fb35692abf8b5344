"""What is shown in a terminal, and what is refused."""

import re

import pytest

from fsdplaunch.display_text import GIB
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.memory import TrainingSetup
from fsdplaunch.estimate.model import count_parameters, describe, llama_of
from fsdplaunch.estimate.report import Report, text_report


@pytest.fixture
def report(llama):
    setup = TrainingSetup(
        strategy="FULL_SHARD", world=16, per_node=8, shards=16, master=4, compute=2, reduce=4, length=512
    )
    model = describe(llama, source="config.json")
    return Report(
        title="<model> & co", words="a model", model=model, setup=setup, memory=8 * GIB, memory_from="--gpu-memory"
    )


def test_table_has_a_row_per_way_to_shard_that_adds_up(report):
    lines = list(text_report(report))
    rows = [line for line in lines if re.match(r"(FULL|SHARD|HYBRID|NO_)\S* .*\d\.\d", line)]
    assert len(rows) == len(report.needs) == 6
    for line, need in zip(rows, report.needs, strict=True):
        numbers = [float(word) for word in re.findall(r"(?<=\s)\d+\.\d+(?=\s)", line.replace("<0.1", "0.05"))]
        assert numbers[-1] == round(need.gpu / GIB, 1)
        assert sum(numbers[:8]) == pytest.approx(numbers[8], abs=0.45)
    assert "(yours)" in rows[0]
    assert not any("(yours)" in line for line in rows[1:])


def test_memory_that_is_not_known_gives_no_verdict(report):
    blind = Report(title="t", words="m", model=report.model, setup=report.setup)
    text = "\n".join(text_report(blind))
    assert "pass --gpu-memory" in text
    assert blind.verdict == "unknown"
    assert (blind.fewest, blind.batch) == (None, None)


def test_missing_number_is_named(llama):
    del llama["vocab_size"]
    with pytest.raises(UsageError, match=r"config\.json has no vocab_size"):
        describe(llama, source="config.json")


@pytest.mark.parametrize("parameters", [60_000_000, 1_000_000_000, 8_000_000_000, 70_000_000_000])
def test_a_size_is_a_llama_of_about_that_size(parameters):
    config = llama_of(parameters)
    counted = describe(config, source="x").sizes.parameters
    assert counted == count_parameters(config["hidden_size"], config["num_hidden_layers"])
    assert abs(counted / parameters - 1) < 0.1
