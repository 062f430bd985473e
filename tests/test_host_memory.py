"""Pinned host memory: as much as the machine has unless the user says less, and a refusal with bytes and remedy."""

import pytest

from jzero import host_memory
from jzero.host_memory import VARIABLE, HostMemoryError

GIB = 2**30


def test_the_limit_is_raised_to_the_machine_unless_it_is_set():
    environ = {}
    host_memory.raise_limit(environ, 512 * GIB + 1)
    assert environ == {VARIABLE: "512"}
    assert host_memory.limit_bytes(environ) == 512 * GIB
    host_memory.raise_limit(environ, 1024 * GIB)
    assert environ == {VARIABLE: "512"}, "the user's stays"


@pytest.mark.parametrize("machine", [None, 8 * GIB])
def test_a_small_or_unknown_machine_changes_nothing(machine):
    environ = {}
    host_memory.raise_limit(environ, machine)
    assert environ == {}
    assert host_memory.limit_bytes(environ) == 64 * GIB


def test_more_than_may_be_pinned_is_refused_with_what_to_set():
    host_memory.check_pinned(64 * GIB, {})
    with pytest.raises(HostMemoryError, match=rf"68,719,476,737 bytes .* 68,719,476,736 .* set {VARIABLE}=65"):
        host_memory.check_pinned(64 * GIB + 1, {})
    host_memory.check_pinned(64 * GIB + 1, {VARIABLE: "65"})


def test_more_than_the_machine_has_is_refused():
    host_memory.check_machine(10, 10)
    host_memory.check_machine(10, None)
    with pytest.raises(HostMemoryError, match=r"11 bytes of host memory.* has 10"):
        host_memory.check_machine(11, 10)


def test_a_limit_that_is_no_number_is_refused():
    with pytest.raises(HostMemoryError, match=f"{VARIABLE}=lots"):
        host_memory.limit_bytes({VARIABLE: "lots"})
