"""metrics.jsonl over the sessions of a run: each step stands in it once, and nothing that was written is lost."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jzero.directories import write_whole

Line = dict[str, Any]


def rewind(path: Path, keep: Callable[[Line], bool]) -> list[Line]:
    """Sets aside the lines of steps that will be run again, and a last line that was cut off while it was written.

    They go to the end of metrics.dropped.jsonl, beside metrics.jsonl.  Killed at any moment, it leaves metrics.jsonl as
    it was or as it shall be.

    Args:
        path: of metrics.jsonl; where there is none, nothing is done.
        keep: whether a line stays; it has a `step`.

    Returns:
        The evaluations among the lines that stay.
    """
    text = path.read_bytes() if path.exists() else b""
    kept, dropped, evaluations = list[bytes](), list[bytes](), list[Line]()
    for raw in filter(None, text.split(b"\n")):
        line = _parsed(raw)
        stays = line is not None and keep(line)
        (kept if stays else dropped).append(raw + b"\n")
        if line is not None and stays and "eval_loss" in line:
            evaluations.append(line)
    if dropped:
        _append(path.with_name(f"{path.stem}.dropped{path.suffix}"), dropped)
    if b"".join(kept) != text:
        write_whole(path, b"".join(kept))
    return evaluations


def _parsed(raw: bytes) -> Line | None:
    """A line of the journal; None for what is left of one."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # no JSON, or not even UTF-8
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _append(path: Path, lines: Sequence[bytes]) -> None:
    with path.open("ab") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
