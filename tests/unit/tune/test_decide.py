"""The rule by which one of two candidates is faster, or neither is."""

import random

import pytest

from fsdplaunch.tune.search import MOST_ROUNDS, contenders, decide
from fsdplaunch.tune.trial import Outcome


def steps(median, spread=0.02):
    return Outcome(seconds=tuple(median * (1 + spread * place) for place in (-2, -1, 0, 1, 2)))


def test_a_large_difference_is_clear_after_one_round():
    assert decide([(steps(1.0), steps(1.5))], (steps(1.0), steps(1.5))) == "first"
    assert decide([(steps(1.5), steps(1.0))], (steps(1.5), steps(1.0))) == "second"


def test_a_first_impression_that_a_round_contradicts_decides_nothing():
    assert decide([(steps(1.5), steps(1.0))], (steps(1.0), steps(1.5))) == "open"
    assert decide([], (steps(1.0), steps(9.0))) == "open"


def test_steps_that_overlap_decide_nothing_at_once():
    wide = (steps(1.0, 0.4), steps(1.4, 0.4))
    assert decide([wide, wide], wide) == "open"


def test_a_small_difference_that_is_always_there_is_clear_after_three_rounds():
    pairs = [(steps(1.0), steps(1.05)), (steps(1.01), steps(1.06)), (steps(0.99), steps(1.04))]
    assert decide(pairs[:2], pairs[0]) == "open"
    assert decide(pairs, pairs[0]) == "first"


def test_a_difference_of_less_than_a_percent_is_none():
    pair = (steps(1.0), steps(1.004))
    assert decide([pair] * 3, pair) == "open"
    assert decide([pair] * 4, pair) == "equal"


def test_the_last_round_ends_it():
    pairs = [(steps(1.0 + 0.2 * (number % 2)), steps(1.1)) for number in range(MOST_ROUNDS)]
    assert decide(pairs[:-1], pairs[0]) == "open"
    assert decide(pairs, pairs[0]) == "equal"


@pytest.mark.parametrize(("ratio", "wanted"), [(1.0, "equal"), (0.9, "first"), (1 / 0.9, "second")])
def test_noisy_pairs_are_mostly_judged_right(ratio, wanted):
    draws = random.Random(0)

    def measured(base):
        shift = base * draws.gauss(1, 0.01)
        return Outcome(seconds=tuple(shift * draws.gauss(1, 0.03) for _ in range(10)))

    right = 0
    for _ in range(100):
        pairs, before = [], (measured(ratio), measured(1.0))
        while (verdict := decide(pairs, before)) == "open":
            pairs.append((measured(ratio), measured(1.0)))
        right += verdict == wanted
    assert right >= 90


def test_contenders_are_those_whose_middle_steps_meet_those_of_the_best():
    found = contenders({"slow": steps(2.0), "best": steps(1.0), "near": steps(1.03), "out": steps(1.2)})
    assert found == ["best", "near"]
    assert contenders({}) == []
    wide = Outcome(seconds=(0.9, 0.9, 1.0, 1.9, 1.9))  # whose own steps say as little
    assert contenders({"best": wide, "near": steps(1.2)}) == ["best", "near"]
