"""A part of scripts/campaigns/attack: strangers, messages, changed files, values that nobody means well."""

import random

import pytest

from scripts.campaigns.attack_classes import inputs, messages, strangers, tampered, yaml_texts

STRANGERS = list(strangers.cases(random.Random(1), len(strangers.KINDS)))
MESSAGES = list(messages.cases(random.Random(1), 24))
TAMPERED = list(tampered.cases(random.Random(3), 20))
INPUTS = [*inputs.cases(random.Random(7), 80), *yaml_texts.cases(random.Random(7), 24)]
CASES = {
    f"{kind}{number}": case
    for kind, cases in (("stranger", STRANGERS), ("message", MESSAGES), ("file", TAMPERED), ("input", INPUTS))
    for number, case in enumerate(cases)
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_met_as_it_should_be(name):
    CASES[name].attack()


def test_every_kind_is_among_them():
    assert {case.name.split()[1].rstrip(",") for case in STRANGERS} == {kind.__name__ for kind in strangers.KINDS}
    assert {case.name.split()[1] for case in TAMPERED} == {attack.__name__ for attack in tampered.ATTACKS}
    to = {"to_coordinator_before", "to_coordinator_during", "to_node"}
    assert {case.name.split()[1] for case in MESSAGES} == to
