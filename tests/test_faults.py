"""Files that went bad, disks that are full, writers that die: what was whole before stays whole and is found."""

import contextlib
import errno
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from saved_arrays import arrays as arrays_of
from saved_arrays import names
from tiny_decoder import batches, decoder

import jzero
from jzero import reader, seal, step_dirs, stored
from jzero.models.decoder import next_token_loss
from jzero.stored import CheckpointError

# Writes that end after another one has failed call an event loop that is gone by then.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
(DATA,) = batches(1, 2 * jax.device_count())


@pytest.fixture(scope="module")
def run():
    return jzero.setup(decoder(), next_token_loss, optax.adamw(1e-2), "dp=-1", DATA)


@pytest.fixture(scope="module")
def two_steps(run, tmp_path_factory):
    """(directory with the steps 1 and 2, step -> arrays)."""
    directory, as_saved, state = tmp_path_factory.mktemp("two") / "checkpoints", {}, run.init()
    with jzero.Checkpoints(directory) as checkpoints:
        for step in (1, 2):
            state, _ = run.step(state, DATA)
            as_saved[step] = arrays(state)
            checkpoints.save(step, state, {"samples": step})
    return directory, as_saved


@pytest.fixture
def directory(two_steps, tmp_path):
    """A copy of the two steps, to be damaged."""
    return shutil.copytree(two_steps[0], tmp_path / "checkpoints")


def arrays(state):
    return {name: np.asarray(x) for name, x in stored.leaves(state).items()}


def assert_holds(checkpoints, run, step, wanted):
    got = arrays(checkpoints.restore(run.abstract_state, step).state)
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)


def a_data_file(step: Path) -> Path:
    """The largest file of arrays."""
    return max((path for path in (step / "state").rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def array_data(step: Path) -> None:
    """One bit of one weight: no format of a file can tell."""
    known = arrays_of(step.parents[1], int(step.name))["params/head/kernel"].tobytes()[:32]
    for path in (step / "state").rglob("d/*"):
        if (at := path.read_bytes().find(known)) >= 0:
            return flip(path, at + 5)
    raise AssertionError("the weights are in no file")


def replaced(path: Path, text: str) -> None:
    assert path.is_file()
    path.write_text(text)


def reseal(step: Path, **changes) -> None:
    path = step / "seal.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DEEP = "[" * 100_000
DAMAGE = {
    "a truncated array": (lambda step: truncate(a_data_file(step)), "/d/"),
    "a missing array": (lambda step: a_data_file(step).unlink(), "is missing"),
    "a bit of a weight": (array_data, "'params/head/kernel' is not what was saved"),
    "a bit of an index": (lambda step: flip(step / "state" / "manifest.ocdbt"), "state/manifest.ocdbt is not what was"),
    "a bit of the names": (lambda step: flip(step / "state" / "_METADATA", 500), "state/_METADATA is not what was"),
    "another position": (
        lambda step: replaced(step / "about" / "metadata", '{"samples": 3}'),
        "about/metadata is not what was",
    ),
    "no names": (lambda step: (step / "state" / "_METADATA").unlink(), "state/_METADATA is missing"),
    "no arrays": (lambda step: shutil.rmtree(step / "state"), "is missing"),
    "no about": (lambda step: shutil.rmtree(step / "about"), "is missing"),
    "no seal": (lambda step: (step / "seal.json").unlink(), "seal.json is missing"),
    "an empty seal": (lambda step: replaced(step / "seal.json", ""), "seal.json cannot be read"),
    "half a seal": (lambda step: truncate(step / "seal.json"), "seal.json cannot be read"),
    "a list for a seal": (lambda step: replaced(step / "seal.json", "[1, 2]"), "seal.json cannot be read"),
    "a deep seal": (lambda step: replaced(step / "seal.json", DEEP), "seal.json cannot be read"),
    "a seal of numbers": (lambda step: reseal(step, files={"about/metadata": 12}), "seal.json cannot be read"),
    "a seal of nothing": (lambda step: reseal(step, checksums={}), "is not what was saved"),
    "nothing at all": (lambda step: (shutil.rmtree(step), step.mkdir()), "seal.json is missing"),
}


@pytest.mark.parametrize("name", ["_METADATA", "_sharding"])
@pytest.mark.parametrize("text", ["", "{}", "null", "[[1]]", DEEP, '{"tree_metadata": {"x": {"key_metadata": 3}}}'])
def test_what_somebody_else_has_written_and_sealed_is_no_more_than_damage(run, directory, name, text):
    step = directory / "2"
    (step / "state" / name).write_text(text)
    seal.write(step, json.loads((step / "seal.json").read_text())["checksums"])
    found = jzero.Checkpoints(directory).restore(run.abstract_state)
    assert found.step == 1
    assert found.damaged[0].startswith(f"step 2 in {directory} is damaged: state cannot be read (")


def test_no_pickle_is_read(run, directory, monkeypatch):
    def unpickles(*_, **__):
        raise AssertionError("something is unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, unpickles)
    assert jzero.Checkpoints(directory).restore(run.abstract_state).step == 2


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_step_is_named_and_the_one_before_restored(run, directory, damage):
    harm, culprit = DAMAGE[damage]
    harm(directory / "2")
    before = names(directory)
    checkpoints = jzero.Checkpoints(directory)
    found = checkpoints.restore(run.abstract_state)
    assert (found.step, found.about) == (1, {"samples": 1})
    (line,) = found.damaged
    assert line.startswith(f"step 2 in {directory} is damaged: ")
    assert culprit in line
    assert "\n" not in line
    assert len(line) < 600
    assert names(directory) == before, "reading changes nothing"

    with pytest.raises(CheckpointError, match=r"step 2 in .* is damaged.*also there: step 1"):
        jzero.Checkpoints(directory).restore(run.abstract_state, 2)


def test_a_damaged_step_is_set_aside_when_the_next_save_begins(run, two_steps, directory):
    truncate(a_data_file(directory / "2"))
    with jzero.Checkpoints(directory, keep=1) as checkpoints:
        state = checkpoints.restore(run.abstract_state).state
        assert names(directory) == ["1", "2"]
        checkpoints.save(2, state)
        assert "2.replaced" in names(directory)
    assert names(directory) == ["2", "2.replaced"]
    assert_holds(checkpoints, run, 2, two_steps[1][1])


def test_a_step_that_is_a_file_is_no_step_and_in_nobodys_way(run, two_steps, directory):
    (directory / "3").write_text("a file")
    (directory / "003").mkdir()
    (directory / "٣").mkdir()
    with jzero.Checkpoints(directory) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        found = checkpoints.restore(run.abstract_state)
        assert (found.step, found.damaged) == (2, ())
        checkpoints.save(3, found.state)
    assert_holds(checkpoints, run, 3, two_steps[1][2])
    assert (directory / "3.replaced").read_text() == "a file"


def test_where_all_steps_are_damaged_each_is_named(run, directory):
    truncate(directory / "1" / "about" / "metadata")
    (directory / "2" / "seal.json").unlink()
    with pytest.raises(CheckpointError) as error:
        jzero.Checkpoints(directory).restore(run.abstract_state)
    assert "step 1 in" in str(error.value)
    assert "about/metadata has" in str(error.value)
    assert "step 2 in" in str(error.value)
    assert names(directory) == ["1", "2"]


# Writing.


def save(checkpoints, state, *steps):
    for step in steps:
        checkpoints.save(step, state)


@contextlib.contextmanager
def largest_file(size: int):
    """No file of this process can grow beyond `size` bytes: a disk that is full, in the eyes of a writer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))  # Python ignores the signal of it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_costs_the_step_that_is_written_and_no_other(run, two_steps, directory):
    checkpoints = jzero.Checkpoints(directory, keep=1)
    state = checkpoints.restore(run.abstract_state).state
    with largest_file(4096), pytest.raises(CheckpointError) as error:
        save(checkpoints, state, 3, 4)  # the first fails, and the second says so
    wanted = f"step 3 could not be written to {directory} (File too large); the newest complete one is 2"
    assert str(error.value) == wanted
    assert names(directory) == ["1", "2"], "nothing half-written is left, and nothing is removed for it"
    assert_holds(checkpoints, run, 2, two_steps[1][2])
    checkpoints.save(5, state)  # there is room again
    checkpoints.close()
    assert names(directory) == ["5"]


def test_the_last_save_fails_at_the_end_of_the_block(run, directory):
    checkpoints = jzero.Checkpoints(directory)
    state = checkpoints.restore(run.abstract_state).state
    with largest_file(4096), pytest.raises(CheckpointError, match="step 3 could not be written"), checkpoints:
        checkpoints.save(3, state)


@pytest.mark.parametrize("place", ["/proc/no/such", "{file}/below"])
def test_a_directory_that_cannot_be_made_is_refused(run, tmp_path, place):
    (tmp_path / "file").touch()
    place = place.format(file=tmp_path / "file")
    with jzero.Checkpoints(place) as checkpoints, pytest.raises(CheckpointError, match=place.split("/")[1]):
        checkpoints.save(1, run.init())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_is_read_only_is_refused(run, directory):
    with jzero.Checkpoints(directory) as checkpoints:
        state = checkpoints.restore(run.abstract_state).state
        directory.chmod(0o500)
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(checkpoints, state, 3, 4)
        directory.chmod(0o700)


@pytest.mark.parametrize("surfaces", ["save", "wait", "close"])
def test_a_writer_that_dies_surfaces(run, two_steps, directory, monkeypatch, surfaces):
    def dies(*_):
        raise RuntimeError("the writer is dead")

    monkeypatch.setattr(seal, "write", dies)  # in the writer's thread, when all arrays are written
    checkpoints = jzero.Checkpoints(directory, keep=1)
    state = checkpoints.restore(run.abstract_state).state
    checkpoints.save(3, state)
    rest = {"save": [4, state], "wait": [], "close": []}[surfaces]
    with pytest.raises(CheckpointError, match=r"step 3 could not be written .*the writer is dead"):
        getattr(checkpoints, surfaces)(*rest)
    assert names(directory) == ["1", "2"]
    checkpoints.close()
    assert_holds(checkpoints, run, 2, two_steps[1][2])


def test_what_is_not_json_is_refused_and_the_next_save_succeeds(run, directory):
    with jzero.Checkpoints(directory) as checkpoints:
        state = checkpoints.restore(run.abstract_state).state
        with pytest.raises(CheckpointError, match=r"JSON cannot hold .* beside step 3"):
            checkpoints.save(3, state, {"function": print})
        checkpoints.save(3, state)
    assert names(directory) == ["2", "3"]


def test_a_kill_while_an_old_step_is_removed_leaves_no_half_of_it(run, directory, monkeypatch):
    class KilledError(BaseException):
        pass

    def killed(path, **_):
        (path / "seal.json").unlink()
        raise KilledError

    checkpoints = jzero.Checkpoints(directory)
    state = checkpoints.restore(run.abstract_state).state
    checkpoints.save(3, state)
    with monkeypatch.context() as patched:
        patched.setattr(step_dirs.shutil, "rmtree", killed)
        with pytest.raises(KilledError):
            checkpoints.wait()
    checkpoints.close()
    with jzero.Checkpoints(directory) as again:
        assert again.steps() == [2, 3]
        again.save(4, again.restore(run.abstract_state).state)
    assert names(directory) == ["3", "4"]


@pytest.mark.parametrize("step", [-1, 1.5, True, None, "latest", "../x", [1], float("nan")])
def test_what_is_no_number_of_a_step_is_refused(run, directory, step):
    checkpoints = jzero.Checkpoints(directory)
    state = checkpoints.restore(run.abstract_state).state
    with pytest.raises(ValueError, match="must be a whole number"):
        checkpoints.save(step, state)
    if step is not None:
        with pytest.raises(CheckpointError, match=r"there is no step .* there are steps 1, 2"):
            checkpoints.restore(run.abstract_state, step)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2", float("inf")])
def test_what_is_no_number_of_steps_to_keep_is_refused(directory, keep):
    with pytest.raises(ValueError, match="keep="):
        jzero.Checkpoints(directory, keep=keep)


def test_what_is_no_train_state_is_refused(run, directory):
    for wrong in (run, run.abstract_state.params, None):
        with pytest.raises(TypeError, match="is no train state: pass what"):
            jzero.Checkpoints(directory).restore(wrong)
        with pytest.raises(TypeError, match="is no train state: pass what"):
            jzero.Checkpoints(directory).save(3, wrong)


def test_a_used_up_state_is_refused(run, directory):
    checkpoints = jzero.Checkpoints(directory)
    state = checkpoints.restore(run.abstract_state).state
    jax.tree.leaves(state.params)[0].delete()
    with pytest.raises(ValueError, match="was given to an earlier step"):
        checkpoints.save(3, state)


def test_a_run_that_goes_back_under_way_leaves_its_later_steps_behind(run, directory):
    with jzero.Checkpoints(directory) as checkpoints:
        checkpoints.save(3, checkpoints.restore(run.abstract_state).state)
        checkpoints.save(4, checkpoints.restore(run.abstract_state, 2).state, {"branch": 2})
    assert checkpoints.steps() == [2, 4]
    assert "3.replaced" in names(directory)
    assert jzero.Checkpoints(directory).restore(run.abstract_state).about == {"branch": 2}


def test_a_step_is_saved_once_and_in_order(run, directory):
    with jzero.Checkpoints(directory) as checkpoints:
        state = checkpoints.restore(run.abstract_state).state
        for step in (0, 1, 2):
            with pytest.raises(CheckpointError, match=f"step {step} is not after step 2"):
                checkpoints.save(step, state)


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), MemoryError(), PermissionError(errno.EACCES, "denied")]
)
def test_what_the_machine_lacks_is_no_damage(run, directory, monkeypatch, error):
    def lacking(*_):
        raise error

    monkeypatch.setattr(reader, "_arrays", lacking)
    with pytest.raises(CheckpointError) as raised:
        jzero.Checkpoints(directory).restore(run.abstract_state)
    assert type(raised.value) is CheckpointError
    assert names(directory) == ["1", "2"]


def test_a_link_to_a_step_goes_and_the_step_stays(run, directory, tmp_path):
    (directory / "1").rename(tmp_path / "elsewhere")
    (directory / "1").symlink_to(tmp_path / "elsewhere")
    with jzero.Checkpoints(directory, keep=1) as checkpoints:
        checkpoints.save(3, checkpoints.restore(run.abstract_state, 2).state)
    assert names(directory) == ["3"]
    assert (tmp_path / "elsewhere" / "seal.json").exists()
