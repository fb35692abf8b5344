"""What is done so that names nobody needs cost no time."""

from fsdplaunch.launch.coordination.network import shorten_name_lookups


def test_lookups_are_shortened_only_where_no_name_has_to_be_found():
    for host, before, after in (
        ("10.0.0.1", {}, {"RES_OPTIONS": "timeout:1 attempts:1"}),
        ("fd00::1", {}, {"RES_OPTIONS": "timeout:1 attempts:1"}),
        ("node0.cluster", {}, {}),
        ("10.0.0.1", {"RES_OPTIONS": "debug"}, {"RES_OPTIONS": "debug"}),
    ):
        environ = dict(before)
        shorten_name_lookups(host, environ)
        assert environ == after
