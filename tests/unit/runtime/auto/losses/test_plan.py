"""What gradients of reductions need, as ranks count alike, differently, and differently later."""

import pytest

from fsdplaunch.runtime.auto.losses.plan import ReductionFacts, plan_reduction
from fsdplaunch.runtime.auto.losses.terms import LossTerms


def plan(kind, *ranks, by="divisor", certain=True):
    facts = [value and ReductionFacts(kind, (value,), (by,), certain=certain) for value in ranks]
    return plan_reduction(facts, (by,))


def test_a_divisor_that_differs_is_a_count_whatever_the_sum_looked_like() -> None:
    for kind in ("sum", "mean"):
        made = plan(kind, 3.0, 5.0)
        assert made.need == "part"
        assert made.follow([(3.0,), (5.0,)]) is True
        assert made.follow([(2.0,), (5.0,)]) is False  # printed already
        assert [made.part(rank, [(3.0,), (5.0,)]) for rank in (0, 1)] == [0.75, 1.25]
        assert [made.part(rank, [(0.0,), (5.0,)]) for rank in (0, 1)] == [0.0, 2.0]
        assert made.part(0, [(0.0,), (0.0,)]) == 1.0


@pytest.mark.parametrize(
    ("by", "later", "need"),
    [
        ("divisor", 6.0, "part"),  # another number of elements
        ("divisor", 0.7, "ranks"),  # a constant that the script changes step by step
        ("factor", 4.0, "ranks"),  # so is one that it multiplies by
        ("divisor", 16.0, "ranks"),
    ],
)
def test_a_divisor_that_is_the_same_everywhere_is_a_constant_until_it_counts(by, later, need) -> None:
    made = plan("sum", 16.0, 16.0, by=by)
    assert made.need == "ranks"
    made.follow([(later,), (later,)])
    assert made.need == need


def test_means_need_nothing_until_ranks_count_differently() -> None:
    made = plan("mean", 8.0, 8.0, by="weight")
    assert (made.need, made.follow([(6.0,), (6.0,)]), made.need) == ("none", False, "none")
    assert (made.follow([(6.0,), (8.0,)]), made.need) == (True, "part")


@pytest.mark.parametrize(("kind", "by"), [("mean", "scale"), ("sum", "factor")])
def test_a_number_of_its_own_that_a_rank_multiplies_by_is_no_count(kind, by) -> None:
    made = plan(kind, 0.5, 0.5, by=by)
    need = made.need
    assert (made.follow([(0.7,), (0.7,)]), made.is_scaled) == (False, False)
    assert (made.follow([(0.3,), (0.4,)]), made.is_scaled, made.need) == (False, True, need)


def test_what_is_unclear_on_one_rank_is_on_all() -> None:
    facts = [ReductionFacts("unknown", ()), ReductionFacts("mean", ())]
    assert plan_reduction(facts, ()).need == "unknown"
    assert plan("sum", 16.0, 16.0, certain=False).need == "unknown"


def test_a_term_that_a_rank_does_not_have_is_one_over_no_elements_there() -> None:
    mean, masked = (
        ReductionFacts("mean", (8.0,), ("weight",), "Mean Pow"),
        ReductionFacts("mean", (3.0,), ("weight",), "Mean Index"),
    )
    total = ReductionFacts("sum", (), (), "Sum Index")
    terms = LossTerms([[mean], [masked, mean, total]])
    assert terms.places == [[0], [1, 0, 2]]
    assert [plan.need for plan in terms.plans] == ["none", "part", "ranks"]
    amounts = terms.amounts(1, [[8.0], [3.0, 8.0]])
    assert amounts == [None, (3.0,)]
    assert terms.plans[1].follow(amounts) is False
    assert terms.plans[1].part(1, amounts) == 2.0
    assert terms.missing() == {1: [0], 2: [0]}
    assert not terms.exclude_each_other()
    assert LossTerms([[mean], [total]]).exclude_each_other()
    assert LossTerms([[mean], [masked]]).differ


def test_what_a_script_multiplies_by_0_is_no_term() -> None:
    nothing = ReductionFacts("sum", (0.0,), ("factor",), "Sum Addmm")
    mean = ReductionFacts("mean", (8.0,), ("weight",), "Mean Pow")
    terms = LossTerms([[nothing], [mean]])
    assert terms.places == [[None], [0]]
    assert terms.missing() == {0: [0]}
    assert not terms.exclude_each_other()
    assert terms.plans[0].part(1, terms.amounts(0, [[0.0], [8.0]])) == 2.0
