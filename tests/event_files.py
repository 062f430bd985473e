"""Reads the TensorBoard event files of a run as a viewer does."""

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog


def records(path: Path) -> Iterator[Event]:
    """The events of one file; a record is a length, a checksum, an event, a checksum."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + length])
        at += length + 16


def events_in(run_dir: Path) -> dict[tuple[int, str], float]:
    """(step, name) -> value of all scalars that a viewer shows; none has two values.

    TensorBoard reads the files in the order of their names, and at a START it forgets this step and all after it
    (its event_accumulator.py, `_CheckForRestartAndMaybePurge`).
    """
    found: dict[tuple[int, str], float] = {}
    for path in sorted(run_dir.glob("events.out.tfevents.*")):
        for event in records(path):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                found = {key: value for key, value in found.items() if key[0] < event.step}
            for value in event.summary.value:
                assert (event.step, value.tag) not in found
                found[event.step, value.tag] = value.simple_value
    return found
