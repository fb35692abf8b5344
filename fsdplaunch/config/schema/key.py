"""What the schema says about one configuration key beside its Python type and its default."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdplaunch.config.schema.kinds import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """Which values of a key `fsdplaunch tune` measures, and where they make another run.

    Attributes:
        values: Canonical values.
        divisors: Also the numbers from 2 that divide the workers: `below` their number, or `through` it.
        versions: The FSDP versions under which they are measured.
        needs: Other keys, dotted, and the values under which this one changes the run; the first is set with it.
        idle: Other keys, dotted, and values under which this one changes nothing.
        follow: Keys, dotted, that say the same in other words: taken back where this one is measured.
        sharded: Whether it changes nothing where each worker holds a full replica.
        gpu: Whether it changes nothing on the CPU.
        when: `precision` and `compile` where that is allowed; `last` when nothing else fits.
    """

    values: tuple[Any, ...] = ()
    divisors: Literal["", "below", "through"] = ""
    versions: tuple[int, ...] = (1, 2)
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    idle: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    follow: tuple[str, ...] = ()
    sharded: bool = False
    gpu: bool = False
    when: Literal["always", "precision", "compile", "last"] = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What the schema says about a key beside its Python type and default.

    Attributes:
        kind: How a loose value is read.
        text: What the key does and when to change it.
        env: The environment variable that carries it to the workers; "": named after the key's path.
        versions: The FSDP versions the key has a meaning in.
        aliases: Other spellings that are honoured and name this one.
        question: What the wizard asks, or None when it does not ask.
        former: Other places where older or published files say it, with a note, dotted; and the value that a true
            flag there stands for, or None where the value itself stands there.
        noise: Written by accelerate and without any effect on FSDP training; read, and named in one note.
        leftover: Why it changes nothing of any run here, in the words of its note; "": it does.
        pinned: The FSDP versions in which every new file says the key, because tools disagree about its default.
        per_node: Whether the nodes of one run may set it differently.
        follows: Other keys, dotted, that it is derived from or that say the same in other words. Set on a higher
            layer, such as the command line, they take back what lower layers say here.
        tunable: What `fsdplaunch tune` measures of it; None: nothing unless named with `--try`.
    """

    kind: Kind
    text: str
    env: str = ""
    versions: tuple[int, ...] = (1, 2)
    aliases: tuple[str, ...] = ()
    former: Mapping[str, Any] = field(default_factory=dict)
    question: str | None = None
    noise: bool = False
    leftover: str = ""
    pinned: tuple[int, ...] = ()
    per_node: bool = False
    follows: tuple[str, ...] = ()
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
