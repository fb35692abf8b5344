"""Room for many connections: the soft limit of open files, raised here and not for what is started from here."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

_OWN = 256
"""Files that a process opens beside its connections."""
_inherited: list[int] = []


def make_room(connections: int) -> None:
    """Raise the soft limit so that so many connections can be open, as far as the hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OWN
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    _inherited[:] = _inherited or [soft]
    highest = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))


@contextmanager
def inherited_limit() -> Iterator[None]:
    """Have the limit be what it was at the start of this process, for what the body starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _inherited:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (_inherited[0], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
