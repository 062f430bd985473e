"""Settings out of a file, flags or a program, checked."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from jzero.config.errors import ConfigError
from jzero.config.explain import explain
from jzero.config.fields import keys_of
from jzero.config.files import read_yaml
from jzero.config.flags import from_text, parse_flags
from jzero.config.schema import Config


def load(argv: Sequence[str], prog: str = "python -m jzero.train") -> Config:
    """The settings that `argv` (without the program's name) asks for; `--help` prints them all and exits.

    Raises:
        ConfigError: one line that names the key, the value and what is allowed.
    """
    return load_with(argv, prog, None)[0]


def load_with(argv: Sequence[str], prog: str, own: argparse.ArgumentParser | None) -> tuple[Config, dict[str, Any]]:
    """The settings, and the values of those of the program's `own` flags that are given.

    Args:
        own: by names that are no keys of a Config; made with `add_help=False`, and with `SUPPRESS` for a default.

    Raises:
        ConfigError: one line that names the key, the value and what is allowed.
    """
    flags = parse_flags(argv, prog, own)
    path = flags.pop("config", None)
    values = {} if path is None else read_yaml(path)
    fields = dict(keys_of(Config))
    for key in [key for key in flags if key in fields]:
        _put(values, key, from_text(fields[key], flags.pop(key)))
    return validate(values), flags


def validate(values: Mapping[str, Any]) -> Config:
    """The Config of nested `values`.

    Raises:
        ConfigError: all that is wrong with them, in one line.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(map(explain, error.errors())))) from None


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    inner = values.setdefault(section, {}) if section else values
    if isinstance(inner, dict):  # else the file is wrong there, and validation says so
        inner[name] = value
