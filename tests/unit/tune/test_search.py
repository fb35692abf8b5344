"""When one of two candidates is faster; the search finds the best of simulated ones, and stops as it should."""

import random

import pytest

from fsdplaunch.tune.search import MOST_ROUNDS, CannotMeasureError, Search, contenders, decide
from fsdplaunch.tune.space import Candidate, Space, read_tries
from fsdplaunch.tune.trial import Outcome
from tests.yaml_config import config_of

GIB = 1024**3
TRIES = ["fsdp_reshard_after_forward=false", "fsdp_activation_checkpointing=true", "fsdp_forward_prefetch=true"]


def steps(median, spread=0.02):
    return Outcome(seconds=tuple(median * (1 + spread * place) for place in (-2, -1, 0, 1, 2)))


def test_a_large_difference_is_clear_after_one_round():
    assert decide([(steps(1.0), steps(1.5))], (steps(1.0), steps(1.5))) == "first"
    assert decide([(steps(1.5), steps(1.0))], (steps(1.5), steps(1.0))) == "second"


def test_a_contradicted_first_impression_and_steps_that_overlap_decide_nothing_at_once():
    assert decide([(steps(1.5), steps(1.0))], (steps(1.0), steps(1.5))) == "open"
    assert decide([], (steps(1.0), steps(9.0))) == "open"
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


def set_of(candidate):
    return {path[-1].removeprefix("fsdp_"): value for path, value in candidate.changes}


def searching(trial, *, limit=None, tries=TRIES, **values):
    space = Space(
        read=lambda overrides: config_of(*overrides),
        world=2,
        on_gpu=False,
        tries=read_tries(tries),
    )
    return Search(space=space, trial=trial, limit=limit, steps=5, **values)


def machine(seconds, memory=lambda changes: GIB, calls=None):
    """A machine on which a step takes `seconds(changes)`."""

    def trial(candidate, steps):
        changes = set_of(candidate)
        if calls is not None:
            calls.append((candidate.label, steps))
        base = seconds(changes)
        times = tuple(base * (1 + 0.001 * (place % 5)) for place in range(steps))
        return Outcome(seconds=times, memory=memory(changes), wall=1.0)

    return trial


def test_gains_of_single_changes_are_combined():
    def seconds(changes):
        return 1.0 - 0.2 * ("reshard_after_forward" in changes) - 0.3 * ("forward_prefetch" in changes)

    search = searching(machine(lambda changes: seconds(changes) + 0.5 * ("activation_checkpointing" in changes)))
    kept = search.run()
    assert set_of(kept) == {"reshard_after_forward": False, "forward_prefetch": True}
    states = {row.candidate.label: row.state for row in search.rows.values()}
    assert states["yours"] == states["activation_checkpointing=true"] == "slower"
    assert search.duels[-1].verdict == "first"


def test_what_is_proposed_was_measured_in_turn_with_yours():
    speeds = {"reshard_after_forward": 0.6, "forward_prefetch": 0.7, "activation_checkpointing": 0.9}
    search = searching(machine(lambda changes: min([1.0, *(speeds[name] for name in changes)])))
    kept = search.run()
    assert [duel.second for duel in search.duels][-1] == Candidate()
    assert search.duels[-1].first == kept


def test_equal_candidates_are_said_to_be_and_yours_is_kept():
    search = searching(machine(lambda changes: 1.0))
    assert search.run() == Candidate()
    assert {duel.verdict for duel in search.duels} == {"equal"}


def test_memory_limit_makes_the_slower_one_the_best():
    def memory(changes):
        return GIB if "activation_checkpointing" in changes else 3 * GIB

    def seconds(changes):
        return 1.3 if "activation_checkpointing" in changes else 1.0

    search = searching(machine(seconds, memory), limit=2 * GIB, tries=TRIES[:2])
    assert set_of(search.run()) == {"activation_checkpointing": True}
    assert search.rows[Candidate()].state == "does not fit"
    assert search.rows[Candidate()].reason == "3.0 GiB of 2.0 GiB"


def test_two_changes_that_only_fit_together_are_found():
    def memory(changes):
        return (4 - len(changes)) * GIB

    search = searching(machine(lambda changes: 1.0 + len(changes), memory), limit=2 * GIB)
    assert len(set_of(search.run())) == 2
    assert searching(machine(lambda changes: 1.0, lambda changes: 9 * GIB), limit=GIB).run() is None


@pytest.mark.parametrize("kind", ["error", "write"])
def test_a_script_that_fails_as_it_is_ends_the_search(kind):
    with pytest.raises(CannotMeasureError, match="bad argument"):
        searching(lambda candidate, steps: Outcome(failure="bad argument", kind=kind)).run()


def test_out_of_memory_as_it_is_does_not():
    def trial(candidate, steps):
        if candidate.is_yours:
            return Outcome(failure="out of memory", kind="memory")
        return machine(lambda changes: 1.0)(candidate, steps)

    assert searching(trial, tries=TRIES[1:2]).run() is not None


def test_values_that_are_the_same_run_are_measured_once():
    calls = []
    tries = ["fsdp_auto_wrap_policy=NO_WRAP", "fsdp_forward_prefetch=true"]
    faster = machine(lambda changes: 1.0 - 0.1 * len(changes), calls=calls)
    search = searching(faster, tries=tries)
    search.run()
    (same,) = [row for row in search.rows.values() if row.state == "same run"]
    assert same.reason == "the same run as auto_wrap_policy=NO_WRAP"
    assert same.candidate.label not in [label for label, _ in calls]
