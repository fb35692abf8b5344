"""Which variables hold secrets, and how they are kept unseen.

All of launch.env may: a list of names would lack the next service's. They travel apart from the configuration, in
one variable, and no file keeps them. Others are secret by their names and by what services' keys look like.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from fsdplaunch.config.schema.config import Config, KeyPath, keys_by_path

HIDDEN = "***"
TELLING = (
    "TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|AUTH(?!OR)|API_?KEY|ACCESS_KEY"
    "|(?<![A-Z0-9])KEYS?(?![A-Z0-9])"
)
"""What the name of a secret contains, in a regular expression for any case."""
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|sk-[A-Za-z0-9-]{8,}|AKIA[0-9A-Z]{12,}"
    r"|xox[abps]-[\w-]{8,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]*)"
)
IN_URL = re.compile(r"(?<=://)[^/\s:@]+(:[^/\s@]*)?@")
"""A user, perhaps with a password, in an address."""
_NAME = re.compile(TELLING, re.IGNORECASE)
_COUNT = re.compile("tokens", re.IGNORECASE)
"""In an option's name: how many there are of them is no secret."""
_PATH: KeyPath = ("launch", "env")
_KEY = ".".join(_PATH)


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable looks like one that nobody else is to read."""
    return bool(_NAME.search(name) or SECRET_VALUE.search(value) or IN_URL.search(value))


def hide_in_words(words: Sequence[str]) -> list[str]:
    """Return a command's words without values that look secret, or stand behind a name that does."""
    shown, follows = list[str](), False
    for word in words:
        name, equals, _ = word.partition("=")
        is_named = bool(_NAME.search(_COUNT.sub("", name))) and (word.startswith("-") or bool(equals))
        if follows and not word.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={HIDDEN}" if is_named and equals else hide_in_text(word))
        follows = is_named and not equals
    return shown


def hide_in_text(text: str) -> str:
    """Return a text with what looks secret in it replaced."""
    return IN_URL.sub(f"{HIDDEN}@", SECRET_VALUE.sub(HIDDEN, text))


def without_variables(config: Config) -> Config:
    """Return a configuration without launch.env, as files have it."""
    return replace(config, launch=replace(config.launch, env={}))


def with_hidden_values(config: Config) -> Config:
    """Return a configuration as it may be shown: launch.env without its values."""
    return replace(config, launch=replace(config.launch, env=dict.fromkeys(config.launch.env, HIDDEN)))


def as_variable(config: Config) -> dict[str, str]:
    """Return launch.env as the variable that carries it to another node's launcher."""
    spec = keys_by_path()[_PATH]
    return {spec.env: spec.key.kind.write(config.launch.env)} if config.launch.env else {}


def without_variable_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line's overrides without those of launch.env, and the keys of these."""
    keys = [one.partition("=")[0].strip() for one in overrides]
    hidden = [key for key in keys if key == _KEY or key.startswith(f"{_KEY}.")]
    return [one for one, key in zip(overrides, keys, strict=True) if key not in hidden], hidden
