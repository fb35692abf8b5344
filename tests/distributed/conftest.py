"""Rank pools that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool

MANY_THREADS = 60
_pools = {size: RankPool(size) for size in (1, 2, 4)}


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    yield _pools[1]
    _pools[1].stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    yield _pools[2]
    _pools[2].stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    yield _pools[4]
    _pools[4].stop()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between files, end ranks that gathered threads, and after the last file all: idle they still cost time."""
    if nextitem is not None and nextitem.path == item.path:
        return
    left = nextitem is None or nextitem.path.parent != item.path.parent
    for pool in _pools.values():
        if left or pool.threads() > MANY_THREADS:
            pool.stop()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """The pool a test's parameter names: 2 or 4 (indirect)."""
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])
    return pool
