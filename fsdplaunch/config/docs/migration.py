"""What becomes of every key and option of accelerate: the tables of docs/migrating-from-accelerate.md."""

from collections.abc import Iterator

from fsdplaunch.config.rules.base import all_notes
from fsdplaunch.config.schema.foreign_options import FOREIGN_OPTIONS
from fsdplaunch.config.schema.walk import KeySpec, all_keys, own_sections

MARK = "<!-- made by scripts/migration_table -->"


def migration_tables() -> str:
    """Return the tables of keys, options and notes as Markdown, made from the schema and the rules."""
    return "\n".join([*_keys(), "", *_options(), "", *_notes()])


def _keys() -> Iterator[str]:
    yield "| key | answer | |"
    yield "| --- | --- | --- |"
    for spec in all_keys():
        if spec.path[0] not in own_sections():
            answer, text = _answer(spec)
            yield f"| `{spec.dotted}` | {answer} | {text} |"
    for spec in all_keys():
        for former in spec.key.former:
            yield f"| `{'.'.join(former.path)}` | taken, noted | read as `{spec.dotted}` |"


def _answer(spec: KeySpec) -> tuple[str, str]:
    """Return what becomes of a key, and why."""
    if spec.key.pending:
        return "refused", spec.key.pending
    if spec.key.noise:
        return "noted", " ".join(spec.key.summary.split())
    if spec.key.leftover:
        return "noted", spec.key.leftover
    if spec.key.versions == (1,):
        return "taken", "under FSDP2 noted and left out"
    return "taken", ""


def _options() -> Iterator[str]:
    yield "| option | answer | |"
    yield "| --- | --- | --- |"
    for name, option in FOREIGN_OPTIONS.items():
        hint = f"; {option.hint}" if option.hint else ""
        yield f"| `--{name}` | {option.answer} | {option.text}{hint} |"


def _notes() -> Iterator[str]:
    yield "| note | when |"
    yield "| --- | --- |"
    for name, text in all_notes().items():
        yield f"| `{name}` | {text} |"
