"""What measured connections mean."""

from fsdplaunch.doctor.checks import check_connections, slowest_rank


def measured(pairs, *, wrong=None, hosts=("a", "a", "b", "b")):
    return {
        "world": len(hosts), "hosts": list(hosts), "wrong": wrong or {}, "pairs": pairs, "all_reduce": 5e9,
        "backend": "gloo",
    }  # fmt: skip


def found(data):
    return [(check.topic, check.status, check.text) for check in check_connections(data)]


def test_equal_links_are_fine_and_the_slowest_is_named():
    pairs = {"0-1": 9e9, "2-3": 8e9, "0-2": 2.0e9, "0-3": 2.1e9, "1-2": 2.2e9, "1-3": 1.9e9}
    reduce, inside, between = found(measured(pairs))
    assert reduce == ("all-reduce", "ok", "right on all 4 ranks, 5.0 GB/s per link (gloo)")
    assert inside[2] == "within a node: 8.5 GB/s in the middle of 2, slowest 8.0 GB/s (rank 2 and 3, b)"
    assert between[1] == "ok"
    assert "slowest 1.9 GB/s (rank 1 and 3, a and b)" in between[2]


def test_one_slow_link_is_a_warning():
    pairs = {"0-2": 2.0e9, "0-3": 2.1e9, "1-2": 2.2e9, "1-3": 0.3e9}
    assert [status for _, status, _ in found(measured(pairs))] == ["ok", "warning"]


def test_rank_that_is_slow_with_everybody_is_named():
    pairs = {"0-1": 1e9, "0-2": 1e9, "1-2": 1e9, "0-3": 1e8, "1-3": 1e8, "2-3": 1e8}
    assert slowest_rank(pairs) == 3
    assert found(measured(pairs, hosts=["a"] * 4))[-1][2] == "rank 3 on a is slow with every peer"
    assert slowest_rank({"0-1": 1e9}) is None


def test_wrong_sum_is_a_problem_of_one_rank():
    (first, *_) = found(measured({}, wrong={"2": [1023]}))
    assert first == ("all-reduce", "problem", "rank 2 on b got a wrong sum for 1023 elements")
