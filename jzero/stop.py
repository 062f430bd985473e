"""SIGTERM and SIGINT, with which a scheduler or a user ends a run: no signal is lost, and none leaves a traceback.

Before the first step there is nothing to keep, and a signal ends the process at once.  From `Stop.hold` on, the first
signal only sets `Stop.asked`, at which the loop looks once per step, and a second one ends the process at once.

Handlers in Python do not suffice.  They run when the main thread comes back from C++, from compiling or from waiting
for devices, which may be minutes; and an exception raised within JAX is logged with a traceback and forgotten in some
places, and leaves an interpreter that crashes when it is torn down in others.  So a thread reads the signals, from the
file descriptor that Python's own handler in C writes to: it ends the process, and it prints, outside of any handler.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, Self

from jzero import ending

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_GRACE_S = 3.0  # for what is `unwinding`
_ECHO_S = 1.0  # `timeout` and launchers signal a process and then its group: within this time it is one signal


class Interrupted(KeyboardInterrupt):
    """A signal ends the run; the message is one line for the user.

    Attributes:
        status: exit status, 128 + number of the signal.
    """

    def __init__(self, number: int, when: str = " before the first step") -> None:
        super().__init__(f"stopped by {_name(number)}{when}")
        self.status = 128 + number


class Stop(contextlib.AbstractContextManager["Stop"]):
    """Holds the handlers of SIGTERM and SIGINT, if it is entered in the main thread; a signal that is ignored stays so.

    Attributes:
        asked: number of the first signal; None as long as there was none.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._held = False
        self._unwinds = False
        self._replaced: dict[int, Any] = {}
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe, into = os.pipe()
            os.set_blocking(into, False)
            self._wakeup = into, signal.set_wakeup_fd(into, warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, name="jzero-signals", daemon=True)
            self._watcher.start()
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._swallowed
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._replaced[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._held = True
        for number, handler in self._replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._watcher:
            sys.unraisablehook = self._unraisable
            into, before = self._wakeup
            signal.set_wakeup_fd(before)
            os.close(into)
            self._watcher.join()
            os.close(self._pipe)

    @contextlib.contextmanager
    def unwinding(self) -> Iterator[None]:
        """What is done inside leaves files unless it unwinds: a signal raises there, and does not end the process.

        To be used where nothing swallows exceptions; what has not unwound within 3 s is ended all the same.

        Raises:
            Interrupted: a signal came.
        """
        self._unwinds = True
        yield
        self._unwinds = False  # not after an exception, which is on its way to `main`

    def hold(self) -> None:
        """From the first call on, a first signal does no more than set `asked`, and tell the user."""
        self._held = True

    def _handle(self, number: int, _: FrameType | None) -> None:
        first, self.asked = self.asked is None, self.asked or number
        if first and self._unwinds:
            raise Interrupted(number)

    def _swallowed(self, lost: Any) -> None:
        """An exception that Python drops: of `_handle`, in one of JAX's callbacks of the garbage collector, say."""
        if isinstance(lost.exc_value, Interrupted):
            _end(lost.exc_value)
        self._unraisable(lost)

    def _watch(self) -> None:
        first, since = 0, 0.0
        while True:
            grace = max(0.0, since + _GRACE_S - time.monotonic()) if first and not self._held else None
            if not select.select([self._pipe], [], [], grace)[0]:
                if not self._held:
                    _end(Interrupted(first))
                continue
            found = os.read(self._pipe, 64)
            if not found:
                return
            for number in filter(_SIGNALS.__contains__, found):
                if not first:
                    first, since = number, time.monotonic()
                    self._first(number)
                elif time.monotonic() - since > _ECHO_S:
                    _end(Interrupted(number, " at once, since it came again"))

    def _first(self, number: int) -> None:
        if self._held:
            line = f"{_name(number)}: ending after this step; again to end at once"
            ending.tell(f"\n{ending.named(line)}")
        elif not self._unwinds:
            _end(Interrupted(number))


def _handle_at_once(number: int, _: FrameType | None) -> NoReturn:
    steps = _command(sys.orig_argv) == "train"
    _end(Interrupted(number, *([] if steps else [""])), above="")


def _end(interrupted: Interrupted, above: str = "\n") -> NoReturn:
    ending.tell(f"{above}{ending.named(interrupted)}")  # below what is left of a progress bar
    os._exit(interrupted.status)


def _name(number: int) -> str:
    return signal.Signals(number).name


def _command(argv: list[str]) -> str:
    """Of `argv`, of the interpreter: "train" of `python -m jzero.train`; "" where it is no command of this package."""
    package, module = __name__.partition(".")[0], argv[argv.index("-m") + 1] if "-m" in argv[:-1] else ""
    return module.removeprefix(f"{package}.") if module.startswith(f"{package}.") else ""


# `python -m jzero.train` imports `jzero` before its own first line: from here on a signal ends it in one line.  Python
# says "-m" for the name of the program until it has found the module; other programs keep their own handlers.
if sys.argv[:1] == ["-m"] and _command(sys.orig_argv) and threading.current_thread() is threading.main_thread():
    for _number in _SIGNALS:
        if signal.getsignal(_number) != signal.SIG_IGN:
            signal.signal(_number, _handle_at_once)
