"""How nodes meet: settings of torch's rendezvous that are wrong, or say nothing to the one that this run has."""

from collections.abc import Iterator

from fsdplaunch.config.rules.base import RuleContext, Violation, note_rule, rule
from fsdplaunch.config.rules.launch_rules import _MACHINES
from fsdplaunch.config.schema.walk import keys_by_path
from fsdplaunch.config.world_size import node_range

_OPTIONS = ("launch", "rendezvous_options")
_READ_ALONE = frozenset({"read_timeout"})
_READ_FIXED = _READ_ALONE | {"join_timeout", "timeout"}
_READ_ELASTIC = _READ_ALONE | {
    "close_timeout",
    "heartbeat_timeout",
    "join_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "last_call_timeout",
}
_NUMBERS = _READ_FIXED | _READ_ELASTIC
_FOR_SEVERAL = (
    ("main_process_ip",),
    ("launch", "rendezvous_timeout_seconds"),
    ("launch", "machine_timeout_seconds"),
    ("launch", "meeting"),
    ("launch", "secret_file"),
)


def _may_be_several(context: RuleContext) -> bool:
    """Tell whether the run may have several nodes; who it is handed to may know more of them than the file."""
    ssh = context.config.ssh
    return node_range(context.config) != (1, 1) or bool(ssh.hosts or ssh.hostfile)


def _options_read(context: RuleContext) -> tuple[frozenset[str], str] | None:
    """Return which of torch's rendezvous settings this run reads, and what numbers its nodes; None for all."""
    if not _may_be_several(context):
        return _READ_ALONE, "one node meets nobody"
    if not context.config.launch.meeting:
        return None
    least, most = node_range(context.config)
    if least == most:
        return _READ_FIXED, "the launchers have numbered the nodes before"
    return _READ_ELASTIC, "the nodes meet at a store whose entries prove the run's secret"


@rule("rendezvous-option")
def _not_a_number(context: RuleContext) -> Iterator[Violation]:
    """Refuse a timeout or an interval in launch.rendezvous_options that is no whole number."""
    for name, text in context.config.launch.rendezvous_options.items():
        if name in _NUMBERS and not (text.isascii() and text.isdecimal()):
            message = f"{name} must be a whole number of seconds, got {text or 'nothing'}"
            if name == "keep_alive_max_attempt":
                message = f"{name} must be a whole number, got {text or 'nothing'}"
            yield Violation(about=(_OPTIONS,), message=message)


@note_rule("unused-rendezvous-options")
def _unused_options(context: RuleContext) -> Iterator[Violation]:
    """Name settings of torch's rendezvous that the rendezvous of this run does not have."""
    read = _options_read(context)
    unread = sorted(set(context.config.launch.rendezvous_options) - read[0]) if read else []
    if read and unread:
        verb = "is" if len(unread) == 1 else "are"
        yield Violation(about=(_OPTIONS, _MACHINES), message=f"{', '.join(unread)} {verb} not read: {read[1]}")


@note_rule("one-node")
def _one_node(context: RuleContext) -> Iterator[Violation]:
    """Name keys about how several nodes meet, in a run on one node."""
    for path in () if _may_be_several(context) else _FOR_SEVERAL:
        if context.sets(keys_by_path()[path]):
            yield Violation(about=(path, _MACHINES), message="is not used: this run has one node")
