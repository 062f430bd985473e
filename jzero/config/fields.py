"""The keys of a schema, and what each takes, in words."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of every key, in the order of the schema."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def values_of(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every key, in the order of the schema."""
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from values_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def kind_of(field: FieldInfo) -> tuple[Any, bool]:
    """(type without None, whether None is allowed) of a field; of several types, the first."""
    if get_origin(field.annotation) not in (Union, UnionType):
        return field.annotation, False
    members = get_args(field.annotation)
    return next(m for m in members if m is not NoneType), NoneType in members


def is_sources(kind: Any) -> bool:
    """Whether a type is that of `data.mixture`, the one key that holds sections."""
    held = get_args(kind)[0] if get_origin(kind) is tuple else None
    return isinstance(held, type) and issubclass(held, BaseModel)


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words: "a whole number >= 1"."""
    kind, optional = kind_of(field)
    if get_origin(kind) is Literal:
        text = "one of " + ", ".join(map(str, get_args(kind)))
    elif is_sources(kind):
        text = "PATH=WEIGHT,PATH=WEIGHT,..., in a file a list of {path: PATH, weight: WEIGHT, ...}"
    elif get_origin(kind) is tuple:
        text = "a list of " + (" and ".join(get_args(get_args(kind)[0])) or "texts")
    else:
        text = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    limits = [f"{sign} {getattr(b, name)}" for b in field.metadata for name, sign in signs if hasattr(b, name)]
    text = f"{text} {' and '.join(limits)}" if limits else text
    return f"{text}, or none" if optional else text


def show(value: Any) -> str:
    """A value as a file or a flag would spell it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)
