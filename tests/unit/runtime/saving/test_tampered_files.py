"""A part of scripts/campaigns/attack: manifests, runs, models and headers that somebody has changed."""

import random

import pytest

from scripts.campaigns.attack_classes import tampered

CASES = list(tampered.cases(random.Random(3), 20))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_it_is_read_right_or_named(number):
    CASES[number].attack()


def test_every_kind_is_among_them():
    assert {case.name.split()[1] for case in CASES} == {attack.__name__ for attack in tampered.ATTACKS}
