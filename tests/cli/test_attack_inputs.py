"""A part of scripts/campaigns/attack: values of keys, options and models, and YAML, that nobody means well."""

import random

import pytest

from scripts.campaigns.attack_classes import inputs, yaml_texts

CASES = [*inputs.cases(random.Random(7), 80), *yaml_texts.cases(random.Random(7), 24)]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_it_is_one_message_and_nothing_is_written(number):
    CASES[number].attack()
