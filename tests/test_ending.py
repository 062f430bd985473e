"""The last words of a process: one line, under its name where there are others, and nobody waits for it."""

import subprocess
import sys

import pytest

from jzero import ending


class LeftError(Exception):
    """In place of the end of this process."""


@pytest.fixture
def one_of(monkeypatch):
    """Makes this process one of several, until the test ends."""

    def leave(status):
        raise LeftError(status)

    monkeypatch.setattr(ending, "leave", leave)
    monkeypatch.setattr(ending, "_LAST_S", 0.0)
    return lambda process, processes: monkeypatch.setattr(ending, "_me", (process, processes))


@pytest.mark.parametrize("last_words", [ending.failed, ending.all_failed])
def test_a_process_on_its_own_says_one_line_without_a_name(capsys, last_words):
    assert last_words("two\n  lines", 2) == 2
    assert capsys.readouterr().err == "error: two lines\n"


@pytest.mark.parametrize(("processes", "name"), [(2, "process 1 of 2: "), (None, "process 1: ")])
def test_what_is_its_own_it_says_under_its_name_and_leaves(capsys, one_of, processes, name):
    one_of(1, processes)
    with pytest.raises(LeftError, match=r"^1$"):
        ending.failed("a full disk", 1)
    with pytest.raises(LeftError, match=r"^143$"):
        ending.ended("stopped", 143)
    assert capsys.readouterr().err == f"error: {name}a full disk\n{name}stopped\n"


@pytest.mark.parametrize(("process", "says"), [(0, "error: a bad mesh\n"), (1, "")])
def test_what_all_have_to_say_the_first_says_and_all_leave(capsys, one_of, process, says):
    one_of(process, 2)
    with pytest.raises(LeftError, match=r"^2$"):
        ending.all_failed("a bad mesh", 2)
    assert capsys.readouterr().err == says


def test_an_exception_that_nobody_catches_ends_one_of_several_at_once_and_names_it():
    program = "from jzero import ending\nending.is_one_of(1, 2)\nimport atexit\natexit.register(print, 'waits')\n1 / 0"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\nerror: process 1 of 2: ZeroDivisionError\n")
