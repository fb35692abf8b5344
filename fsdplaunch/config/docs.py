"""What a person or a program reads about the keys, generated from the schema: explanations, JSON Schema."""

import textwrap
from collections.abc import Sequence
from typing import Any

from fsdplaunch.config.load import LoadedConfig
from fsdplaunch.config.names import former_places, key_named, spellings
from fsdplaunch.config.schema.config import KeySpec, all_keys, section_classes, value_at
from fsdplaunch.config.yaml_text import flow_text, plain_value
from fsdplaunch.errors import UsageError

_WIDTH = 100


def keys_named(word: str) -> tuple[KeySpec, ...]:
    """Return the keys a word names: one key, or all keys of a section.

    Raises:
        UsageError: No key or section has that name.
    """
    if word in section_classes():
        return tuple(spec for spec in all_keys() if spec.path[0] == word)
    found = key_named(word)
    if isinstance(found, KeySpec):
        return (found,)
    msg = f"{word} is not a key"
    raise UsageError(msg, hint=found.hint or "without a key, all are listed")


def default_text(spec: KeySpec) -> str:
    """Return the default as a file would say it; "left out" where the rest of the file or the machine decides."""
    if spec.default is None or spec.default in ((), {}):
        return "left out"
    return flow_text(plain_value(spec, spec.default))


def describe(spec: KeySpec, loaded: LoadedConfig | None = None) -> dict[str, Any]:
    """Return everything the schema says about a key; with a loaded file, its value and where that came from."""
    described: dict[str, Any] = {
        "key": spec.dotted,
        "text": spec.key.text,
        "values": spec.key.kind.expects,
        "choices": list(spec.key.kind.choices),
        "default": plain_value(spec, spec.default),
        "versions": list(spec.key.versions),
        "env": spec.env,
        "aliases": list(spec.key.aliases),
        "changes_nothing": spec.key.leftover,
        "without_effect": spec.key.noise,
    }
    if loaded is not None:
        described["value"] = plain_value(spec, value_at(loaded.config, spec.path))
        described["origin"] = loaded.origins[spec.path].text
    return described


def explain(spec: KeySpec, loaded: LoadedConfig | None = None) -> str:
    """Return a paragraph about one key; with a loaded file, its value and where that came from."""
    head = f"{spec.dotted}    default: {default_text(spec)}"
    if loaded is not None:
        value = value_at(loaded.config, spec.path)
        shown = "left out" if value is None else flow_text(plain_value(spec, value))
        head += f"    yours: {shown} ({loaded.origins[spec.path].text})"
    facts = {
        "values": spec.key.kind.expects,
        "env": spec.env,
        "only": f"FSDP{spec.key.versions[0]}" if len(spec.key.versions) == 1 else "",
        "also": ", ".join(spec.key.aliases),
        "noted": spec.key.leftover,
    }
    lines = [head, *textwrap.wrap(spec.key.text, _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    for label, text in facts.items():
        lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:<10}", subsequent_indent=" " * 12)
    return "\n".join(lines)


def list_keys(specs: Sequence[KeySpec] | None = None) -> str:
    """Return one line per key, by section: its name and its first sentence."""
    chosen = [spec for spec in (all_keys() if specs is None else specs) if not spec.key.noise]
    width = max(len(spec.name) for spec in chosen) + 2
    sections: dict[str, list[KeySpec]] = {}
    for spec in chosen:
        sections.setdefault(spec.path[0] if len(spec.path) > 1 else "top level", []).append(spec)
    lines: list[str] = []
    for name, members in sections.items():
        lines += ["", name, *(f"  {spec.name:<{width}}{spec.key.summary}" for spec in members)]
    return "\n".join(lines[1:])


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a file: every honoured spelling is a property, null a key that is left out."""
    properties = _properties("")
    for name, section in section_classes().items():
        properties[name] = {
            "description": " ".join((section.__doc__ or "").split()),
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": _properties(name),
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fsdplaunch configuration",
        "description": "What fsdplaunch launch runs. Files of accelerate are valid too.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _properties(section: str) -> dict[str, Any]:
    """Return a section's keys, their other spellings, and what older files say there that stands elsewhere now."""
    own = {}
    for spec in all_keys():
        if ".".join(spec.path[:-1]) == section:
            default = {} if spec.default is None else {"default": plain_value(spec, spec.default)}
            own[spec.name] = {"description": spec.key.text, **default, **_values(spec)}
    other = {
        name: {"description": f"Same as {spec.name}.", "deprecated": True, **_values(spec)}
        for name, spec in spellings(section).items()
        if name != spec.name
    }
    elsewhere = {
        name: {
            "description": f"Read as {spec.dotted}.",
            "deprecated": True,
            **(_values(spec) if means is None else {"type": ["boolean", "null"]}),
        }
        for (home, name), (spec, means) in former_places().items()
        if home == section
    }
    return own | other | elsewhere


def _values(spec: KeySpec) -> dict[str, Any]:
    kind = dict(spec.key.kind.schema)
    if "enum" in kind:
        return {"enum": [*kind["enum"], None]}
    if "anyOf" in kind:
        return {"anyOf": [*kind["anyOf"], {"type": "null"}]}
    types = kind["type"] if isinstance(kind["type"], list) else [kind["type"]]
    return kind | {"type": [*types, "null"]}
