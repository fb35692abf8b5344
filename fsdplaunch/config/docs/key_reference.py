"""The key reference, configs/REFERENCE.md: generated, so that it cannot disagree with the schema."""

from collections.abc import Iterator

from fsdplaunch.config.docs.explain import default_text, needs_torch
from fsdplaunch.config.load.problems import TEXT_NOTES, TEXT_PROBLEMS
from fsdplaunch.config.rules.base import all_notes, all_rules
from fsdplaunch.config.schema.walk import KeySpec, all_keys, section_classes

_HEAD = """# Every key

Made by `fsdplaunch config explain --markdown` from the schema; a test keeps it in step. Keys that accelerate has
keep their name, place and meaning. Names are accepted in any case, with spaces or dashes, or as numeric codes.
A key that is left out, or says `null`, has its default; "left out" as a default means that the rest of the
file or the machine decides.
"""


def reference() -> str:
    """Return the text of configs/REFERENCE.md."""
    return "\n".join([_HEAD, *_sections(), *_problems()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    for section in ("", *section_classes()):
        specs = [spec for spec in all_keys() if ".".join(spec.path[:-1]) == section]
        yield f"## {f'`{section}`' if section else 'Top level'}\n"
        if section:
            yield " ".join((section_classes()[section].__doc__ or "").split()) + "\n"
        for spec in specs:
            if not spec.key.noise:
                yield from _key(spec)
        noise = [f"`{spec.name}`" for spec in specs if spec.key.noise]
        if noise:
            yield f"Written by accelerate and without effect here: {', '.join(noise)}.\n"


def _key(spec: KeySpec) -> Iterator[str]:
    only = f"; only `fsdp_version: {spec.key.versions[0]}`" if len(spec.key.versions) == 1 else ""
    yield f"### `{spec.name}`\n"
    yield spec.key.text + "\n"
    yield f"* {spec.key.kind.expects}; default: `{default_text(spec)}`{only}"
    yield f"* environment: `{spec.env}`"
    if spec.key.needs_torch:
        yield f"* needs {needs_torch(spec)}"
    if spec.key.aliases:
        yield f"* also written {', '.join(f'`{alias}`' for alias in spec.key.aliases)}"
    if spec.key.former:
        places = ", ".join(f"`{'.'.join(former.path)}`" for former in spec.key.former)
        yield f"* also read from {places}"
    if spec.key.leftover:
        yield f"* changes nothing: {spec.key.leftover}"
    if spec.key.pending:
        yield f"* refused for now: {spec.key.pending}"
    yield ""


def _problems() -> Iterator[str]:
    yield "## What a file can do wrong\n"
    yield "All problems of a file are reported at once, each with the name below in brackets.\n"
    yield "| name | meaning |"
    yield "|---|---|"
    for name, text in {**TEXT_PROBLEMS, **all_rules()}.items():
        yield f"| `{name}` | {text} |"
    yield "\n## What is noted\n"
    yield "Notes change nothing of the run; `fsdplaunch config validate --strict` counts them as problems.\n"
    yield "| name | meaning |"
    yield "|---|---|"
    for name, text in {**TEXT_NOTES, **all_notes()}.items():
        yield f"| `{name}` | {text} |"
