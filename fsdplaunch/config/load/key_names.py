"""Which key a written name means: canonical names, aliases, missing prefixes, and what to say about the rest."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from fsdplaunch.config.schema.key import FormerPlace
from fsdplaunch.config.schema.walk import KeySpec, Path, all_keys, own_sections, section_classes

AUTO_WRAP = "auto_wrap"
"""The word of transformers' `--fsdp "full_shard auto_wrap"`: units, by layers or by size."""
_CLOSE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownKey:
    """A name that is no key.

    Attributes:
        id: `unknown-key` or `misplaced-key`.
        message: What is wrong.
        hint: What was meant, as far as that can be guessed.
        meant: The key of this name in another section, or None.
    """

    id: str
    message: str
    hint: str | None
    meant: KeySpec | None = None


def key_prefix(section: str) -> str:
    """Return what keys of one of accelerate's sections begin with, and may be written without; "" elsewhere."""
    if not section or section in own_sections():
        return ""
    full = any(spec.name.startswith(f"{section}_") for spec in all_keys())
    return f"{section}_" if full else section.removesuffix("config")


@cache
def spellings(section: str) -> dict[str, KeySpec]:
    """Return every spelling that is honoured in a section ("" is the top level), canonical names first."""
    specs = [spec for spec in all_keys() if ".".join(spec.path[:-1]) == section]
    prefix = key_prefix(section)
    table = {spec.name: spec for spec in specs}
    for spec in specs:
        for name in (spec.name, *spec.key.aliases):
            bare = name.removeprefix(prefix)
            for spelling in (name, bare, prefix + bare):
                table.setdefault(spelling, spec)
    return table


def find_key(section: str, name: str, *, guess: bool = True) -> KeySpec | UnknownKey:
    """Return the key that `name` means inside `section` ("" for the top level), or what to say of it.

    Args:
        section: Dotted.
        name: As written.
        guess: Look for one that is spelt nearly so, which takes milliseconds.
    """
    found = spellings(section).get(name)
    if found is not None:
        return found
    place = f"in {section}" if section else "at the top level"
    homes = [(home, spec) for home in ("", *section_classes()) if (spec := spellings(home).get(name)) is not None]
    if homes:
        belongs = " or ".join(f"under {home}" if home else "at the top level" for home, _ in homes)
        meant = homes[0][1] if len(homes) == 1 else None
        return UnknownKey(
            id="misplaced-key", message=f"has no meaning {place}", hint=f"it belongs {belongs}", meant=meant
        )
    hint = _guess(section, name) if guess else None
    return UnknownKey(id="unknown-key", message=f"is not a key {place}", hint=hint)


@cache
def former_places() -> dict[tuple[str, str], tuple[KeySpec, FormerPlace]]:
    """Return every other place where files say a key, by section and name there."""
    found = {}
    for spec in all_keys():
        for former in spec.key.former:
            section, name = ".".join(former.path[:-1]), former.path[-1]
            for spelling in dict.fromkeys((name, name.removeprefix(key_prefix(section)))):
                found[section, spelling] = (spec, former)
    return found


def find_former(section: str, name: str) -> tuple[KeySpec, FormerPlace] | None:
    """Return the key that older files say as `name` in this section, and how, or None."""
    return former_places().get((section, name))


def find_bare(name: str) -> KeySpec | None:
    """Return the key that `name` means without its section. A test sees to it that there is only one."""
    exact = [spec for spec in all_keys() if spec.name == name]
    tables = [spellings(section) for section in ("", *section_classes())]
    return next(iter(exact or [table[name] for table in tables if name in table]), None)


def is_bare_section(names: Iterable[str]) -> bool:
    """Tell whether a file's top level consists of keys of fsdp_config, as transformers' own files do."""
    words = list(names)
    elsewhere = {*spellings(""), *section_classes()} - {*spellings("fsdp_config")}
    return any(word in spellings("fsdp_config") for word in words) and not any(word in elsewhere for word in words)


def closest(word: str, words: list[str], *, cutoff: float = _CLOSE) -> list[str]:
    """Return the spellings most like `word`, best first."""
    from difflib import get_close_matches

    return get_close_matches(word, words, n=3, cutoff=cutoff)


def _guess(section: str, name: str) -> str | None:
    word = name.replace("-", "_").lower()
    here = closest(word, [*spellings(section), *(section_classes() if not section else ())])
    if here:
        spec = spellings(section).get(here[0])
        return f"did you mean {spec.name if spec else here[0]}?"
    for home in ("", *section_classes()):
        near = closest(word, list(spellings(home)))
        if near:
            spec = spellings(home)[near[0]]
            return f"did you mean {spec.name} {f'under {home}' if home else 'at the top level'}?"
    return None


def path_of(dotted: str) -> Path:
    """Split `section.key` into its parts, dashes as underscores."""
    return tuple(dotted.strip().replace("-", "_").split("."))
