"""Rank pools that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.stop()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """The pool a test's parameter names: 2 or 4 (indirect)."""
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])
    return pool
