"""Orbax's asynchronous writer, with which all processes write a step or none does, and none waits for one that failed.

Left to itself, a process whose part is written waits at a barrier for one whose disk is full, until the save times out.
Here all processes ask each other how it goes while they wait, and walk away from the barrier when one has failed.
"""

import concurrent.futures
import itertools
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.multihost import get_barrier_sync_fn

from jzero import distributed, together

_TIMEOUT_S = 1200  # of a save
_ASKING_S = 0.2  # between two questions
_numbers = itertools.count()  # the same in all processes
_REASON = 300  # characters of somebody else's message


class WriteError(RuntimeError):
    """What was to be written is not there; the message says what was wrong, and in which process."""


class Writer:
    """Writes one directory after the other.  All processes call the same methods in the same order."""

    def __init__(self, handler: ocp.CompositeCheckpointHandler, written: Callable[[], None]) -> None:
        """Writes nothing yet.

        Args:
            handler: of what is to be written.
            written: called on process 0, in a thread, when all have written and before the directory has its name; what
                it raises ends the save.
        """
        self._number = next(_numbers)
        self._given_up, self._ended = concurrent.futures.Future[None](), concurrent.futures.Future[None]()
        barrier = self._barrier if jax.process_count() > 1 else None
        options = ocp.options.AsyncOptions(_TIMEOUT_S, barrier, post_finalization_callback=written)
        self._writer = ocp.AsyncCheckpointer(handler, async_options=options)

    def save(self, directory: Path, args: Any) -> None:
        """Begins to write, and returns when the arrays may be donated.

        Raises:
            WriteError: it cannot begin; of several processes, `wait` says so in all.
        """
        try:
            self._writer.save(directory, args=args)
        except Exception as error:
            if distributed.lost_peer(error):
                raise
            if jax.process_count() == 1:
                raise WriteError(reason(error)) from error
            self._ended = concurrent.futures.Future()
            self._ended.set_exception(error)
        else:
            self._ended = _in_thread(self._writer.wait_until_finished)

    def wait(self) -> None:
        """Waits until all is written and has its name.

        Raises:
            WriteError: it has failed, in this process or in another.
        """
        faults = self._faults()
        while None in faults and not any(faults):
            concurrent.futures.wait([self._ended], None if len(faults) == 1 else _ASKING_S)
            faults = self._faults()
        failed = [(i, fault) for i, fault in enumerate(faults) if fault]
        if failed:
            (process, fault), several = failed[0], len(faults) > 1
            raise WriteError(f"process {process} of {len(faults)}: {fault}" if several else fault) from self._error()

    def _faults(self) -> list[str | None]:
        """By process: what went wrong, "" if all is written, None if it is being written."""
        error = self._error()
        mine = reason(error) if error else "" if self._ended.done() else None
        return [json.loads(text) for text in together.gather_texts(json.dumps(mine))]

    def _error(self) -> BaseException | None:
        return self._ended.exception() if self._ended.done() else None

    def close(self) -> None:
        """Ends its threads; after a failure it does not wait for those that wait for another process."""
        if jax.process_count() == 1 or (self._ended.done() and not self._error()):
            self._writer.close()
        elif not self._given_up.done():
            self._given_up.set_result(None)
            self._writer.cancel()

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        wait, own_key = get_barrier_sync_fn(), f"{key}.{self._number}"  # of an earlier writer some may still wait at
        passed = _in_thread(lambda: wait(key=own_key, timeout_ms=timeout_ms))
        concurrent.futures.wait([passed, self._given_up], return_when=concurrent.futures.FIRST_COMPLETED)
        if self._given_up.done():
            raise concurrent.futures.CancelledError
        passed.result()


def _in_thread(work: Callable[[], None]) -> concurrent.futures.Future[None]:
    """What becomes of `work`; the interpreter does not wait for it when it ends."""
    future = concurrent.futures.Future[None]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised again by whoever asks the future)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return future


def reason(error: BaseException) -> str:
    """Somebody else's message in a few words: what the system said, if it was the system."""
    if type(error) is Exception and error.__cause__ is not None:  # Orbax's, which says at length where it was
        error = error.__cause__
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(number[1])) if number else " ".join(str(error).split())[:_REASON]
