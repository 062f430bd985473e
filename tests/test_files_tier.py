"""Groups in files: what fails has nothing under way when it says so, and what is closed says that it is closed."""

from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.block_files import BlockFiles
from jzero.offload.copies import Copies
from jzero.offload.files import InFiles, from_device, to_device
from jzero.offload.piece import Piece
from jzero.offload.place import Place

SHAPE = (4, 1024)


@pytest.fixture(scope="module")
def piece():
    mesh = jzero.make_mesh("dp=1", jax.devices()[:1])
    return Piece.all_of(jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=NamedSharding(mesh, P())))


@pytest.fixture
def files(tmp_path, piece):
    """Of one group of two pieces."""
    tier = InFiles((str(tmp_path),), "test", {0: [Place(piece, (name,)) for name in "ab"]}, to_device, from_device)
    yield tier
    tier.close()


@pytest.fixture
def arrays(piece):
    return [jnp.full(SHAPE, value, device=piece.whole.sharding) for value in (1.0, 2.0)]


@pytest.fixture
def stored(files, arrays):
    parts, left = files.store(0, arrays)
    left()
    return parts


class Slow:
    """Blocks of which the first fails at once, while the second is under way."""

    def __init__(self):
        self.second, self.calls = Future(), 0

    def __call__(self, *_):
        self.calls += 1
        if self.calls == 2:
            return self.second
        failed = Future()
        failed.set_exception(jzero.TierError("a bad sector"))
        return failed

    def holds_back(self, done):
        """`done` raises the error of the first, and not before the second is done with."""
        with pytest.raises(TimeoutError):
            done(0.2)
        self.second.set_result(None)
        with pytest.raises(jzero.TierError, match="a bad sector"):
            done(10)


def test_a_group_comes_back_as_it_was_stored(files, arrays, stored):
    for x, wanted in zip(files.fetch(0, stored)(), (1.0, 2.0), strict=True):
        np.testing.assert_array_equal(x, np.full(SHAPE, wanted))


def test_a_read_that_fails_is_said_when_no_other_fills_memory_any_more(files, stored, monkeypatch):
    slow = Slow()
    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "read", slow)
        slow.holds_back(files.fetch(0, stored))
    for x, wanted in zip(files.fetch(0, stored)(), (1.0, 2.0), strict=True):
        np.testing.assert_array_equal(x, np.full(SHAPE, wanted))


def test_a_read_that_fails_lets_go_of_memory_that_arrays_have_left(files, stored, monkeypatch):
    def refused(*_):
        raise jzero.TierError("a bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "read", refused)
        with pytest.raises(jzero.TierError, match="a bad sector"):
            files.fetch(0, stored)()
    assert not files._copies._lent


def test_a_write_that_fails_is_said_when_no_other_is_under_way(files, arrays, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(BlockFiles, "write", slow)
    slow.holds_back(files.store(0, arrays)[1])


@pytest.mark.parametrize("used", [True, False], ids=["used", "never used"])
def test_what_is_closed_says_so_and_makes_no_file(files, piece, arrays, tmp_path, used):
    parts = files.store(0, arrays)[0] if used else []
    files.close()
    files.close()
    shards = [np.zeros(SHAPE, np.float32)]
    calls = {
        "fetch": lambda: files.fetch(0, parts),
        "store": lambda: files.store(0, arrays),
        "fill": lambda: files.fill(0, 0, piece, shards),
        "read": lambda: files.read(Place(piece, ("a",))),
        "begin_read": lambda: files.begin_read("a", shards[0]),
        **({"check": parts[0].check} if used else {}),
    }
    for call in calls.values():
        with pytest.raises(jzero.TierError, match=f"the run is closed, and its files in {tmp_path} are removed"):
            call()
    assert not list(tmp_path.iterdir())


def test_memory_is_taken_again_after_a_read_that_went_well(files, arrays, stored):
    first = files.fetch(0, stored)()
    places = {x.unsafe_buffer_pointer() for x in first}
    again, left = files.store(0, first)
    left()
    assert isinstance(files._copies, Copies)
    assert {x.unsafe_buffer_pointer() for x in files.fetch(0, again)()} == places
