"""What is wrong with settings, in one line each, by the name that a file or a flag has for it."""

import difflib
from collections.abc import Sequence
from typing import Any

from jzero.config.fields import allowed, keys_of, show
from jzero.config.schema import Config
from jzero.config.sections import MixtureSource


def explain(error: Any) -> str:
    """One pydantic error in one line."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    known, parts = dict(keys_of(Config)), [str(part) for part in error["loc"]]
    if parts[:2] == ["data", "mixture"] and len(parts) > 3:
        return _explain_source(error, f"data.mixture, source {int(parts[2]) + 1}", parts[3])
    if error["type"] in ("extra_forbidden", "invalid_key"):
        return unknown_key(".".join(parts))
    key = next((k for k in (".".join(parts[:2]), parts[0]) if k in known), ".".join(parts))
    if key in known:
        return f"{key} = {show(error['input'])}: must be {allowed(known[key])}"
    inside = ", ".join(name for name in known if name.startswith(f"{key}."))
    return f"{key} = {show(error['input'])}: must be a section, with keys of {inside}"


def _explain_source(error: Any, where: str, name: str) -> str:
    """One error in one source of a mixture."""
    fields = MixtureSource.model_fields
    if error["type"] == "missing":
        return f"{where}: has no {name}; a source is {{path: PATH, weight: WEIGHT, ...}}"
    if name not in fields:
        return f"{where}: {name}: unknown key; the keys of a source are {', '.join(fields)}"
    return f"{where}: {name} = {show(error['input'])}: must be {allowed(fields[name])}"


def unknown_key(key: str, flag: str = "", own: Sequence[str] = ()) -> str:
    """That there is no such key, and which one was perhaps meant.

    Args:
        flag: what stands before a key: "--" in a flag.
        own: other flags that there are.
    """
    names = [name for name, _ in keys_of(Config)] + (["config", *own] if flag else [])
    if key in names:
        return f"{key}: in a file, the keys of a section are nested under its name"
    # The right word may stand in the wrong section, or in none.
    short, last = {name.rpartition(".")[2]: name for name in reversed(names)}, key.rpartition(".")[2]
    near = difflib.get_close_matches
    close = [last] if last in short else near(key, names, 1) or near(last, short, 1)
    hint = f"did you mean {flag}{short.get(close[0], close[0])}?" if close else "--help lists all keys"
    return f"{flag}{key}: unknown key; {hint}"
