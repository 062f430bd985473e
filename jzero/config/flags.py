"""Settings as flags, which are generated from the schema."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from jzero.config.errors import ConfigError
from jzero.config.explain import unknown_key
from jzero.config.fields import allowed, is_sources, keys_of, kind_of, show
from jzero.config.files import StrictLoader
from jzero.config.schema import Config


def parse_flags(argv: Sequence[str], prog: str, own: argparse.ArgumentParser | None = None) -> dict[str, Any]:
    """Key -> text of the flags that are given.

    Args:
        argv: without the program's name.
        prog: how the program is called, for `--help`.
        own: flags of the program beside the settings, by names that are no keys; made with `add_help=False`.

    Raises:
        ConfigError: a flag that is no key, or that has no value.
    """
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [--KEY VALUE ...]",
        description="Every key may stand in the YAML file or be a flag; flags win.",
        allow_abbrev=False,
        parents=[own] if own else [],
    )
    parser.add_argument("--config", metavar="FILE.yaml", default=argparse.SUPPRESS, help="a file of settings")
    groups: dict[str, Any] = {"": parser}
    for key, field in keys_of(Config):
        section = key.rpartition(".")[0]
        if section not in groups:
            doc = Config.model_fields[section].annotation.__doc__  # pyright: ignore[reportOptionalMemberAccess]
            groups[section] = parser.add_argument_group(section, doc)
        text = f"{field.description} ({allowed(field)}; default {show(field.default)})"
        groups[section].add_argument(
            f"--{key}", metavar="VALUE", default=argparse.SUPPRESS, help=text.replace("%", "%%")
        )
    known, unknown = parser.parse_known_args(_join_negative_values(argv))
    if unknown:
        word = unknown[0]
        raise ConfigError(
            unknown_key(word[2:].partition("=")[0], "--", _names(own))
            if word.startswith("--")
            else f"{word!r}: a flag starts with --"
        )
    return vars(known)


def from_text(field: FieldInfo, text: str) -> Any:
    """What a flag's text would be in a file; text that does not fit is left for validation to name."""
    kind, optional = kind_of(field)
    if optional and text == "none":
        return text  # the section knows the word
    if is_sources(kind):
        return [_source_from_text(part) for part in text.strip("[]").split(",") if part.strip()]
    if get_origin(kind) is tuple:
        return [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    if kind is str or all(isinstance(a, str) for a in get_args(kind) or (0,)):
        return text
    try:
        value = yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _names(parser: argparse.ArgumentParser | None) -> list[str]:
    """Of the flags of a parser."""
    return [action.dest for action in parser._actions] if parser else []  # noqa: SLF001 (argparse has no other way)


def _source_from_text(text: str) -> Any:
    """PATH=WEIGHT as a file would say it; text that is not of that form is left for validation to name."""
    path, sign, weight = text.strip().rpartition("=")
    try:
        return {"path": path, "weight": float(weight)} if sign else text
    except ValueError:
        return text


def _join_negative_values(argv: Sequence[str]) -> list[str]:
    """`--key -1e3` as `--key=-1e3`: argparse would take the value for another flag."""
    joined: list[str] = []
    for word in argv:
        if re.match(r"-[\d.]", word) and joined and re.match(r"--[^=]+$", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))
