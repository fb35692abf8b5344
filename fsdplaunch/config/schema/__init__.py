"""What the schema says about one configuration key beside its Python type and its default."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdplaunch.config.schema.kinds import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """Which values of a key `fsdplaunch tune` measures, and where they make another run."""

    values: tuple[Any, ...] = ()  # canonical values
    # Also the numbers from 2 that divide the workers: `below` their number, or `through` it.
    divisors: Literal["", "below", "through"] = ""
    versions: tuple[int, ...] = (1, 2)  # the FSDP versions under which they are measured
    # Other keys, dotted, and the values under which this one changes the run; the first is set with it.
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Other keys, dotted, and values under which this one changes nothing.
    idle: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Keys, dotted, that say the same in other words: taken back where this one is measured.
    follow: tuple[str, ...] = ()
    sharded: bool = False  # whether it changes nothing where each worker holds a full replica
    gpu: bool = False  # whether it changes nothing on the CPU
    # `precision` and `compile` where that is allowed; `last` when nothing else fits.
    when: Literal["always", "precision", "compile", "last"] = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What the schema says about a key beside its Python type and default."""

    kind: Kind  # how a loose value is read
    text: str  # what the key does and when to change it
    env: str = ""  # the environment variable that carries it to the workers; "": named after the key's path
    versions: tuple[int, ...] = (1, 2)  # the FSDP versions the key has a meaning in
    aliases: tuple[str, ...] = ()  # other spellings that are honoured and name this one
    # Other places where older or published files say it, with a note, dotted; and the value that a true flag
    # there stands for, or None where the value itself stands there.
    former: Mapping[str, Any] = field(default_factory=dict)
    question: str | None = None  # what the wizard asks, or None when it does not ask
    # Written by accelerate and without any effect on FSDP training; read, and named in one note.
    noise: bool = False
    leftover: str = ""  # why it changes nothing of any run here, in the words of its note; "": it does
    # The FSDP versions in which every new file says the key, because tools disagree about its default.
    pinned: tuple[int, ...] = ()
    per_node: bool = False  # whether the nodes of one run may set it differently
    # Other keys, dotted, that it is derived from or that say the same in other words. Set on a higher layer,
    # such as the command line, they take back what lower layers say here.
    follows: tuple[str, ...] = ()
    # What `fsdplaunch tune` measures of it; None: nothing unless named with `--try`.
    tunable: Tunable | None = None

    @property
    def summary(self) -> str:
        """Return the first sentence of the text, without its full stop where it is the only one."""
        return self.text.split(". ", 1)[0].rstrip(".")

    @property
    def unread(self) -> bool:
        """Return whether no run reads it: a value is noted."""
        return self.noise or bool(self.leftover)


def key(kind: Kind, default: Any, **remarks: Any) -> Callable[[str], Any]:
    """Return what declares a key, given its text. Typed Any so that the class below can give the precise type."""

    def declare(text: str) -> Any:
        metadata = {"key": Key(kind=kind, text=" ".join(text.split()), **remarks)}
        if isinstance(default, dict):
            return field(default_factory=lambda: dict(default), metadata=metadata)
        return field(default=default, metadata=metadata)

    return declare
