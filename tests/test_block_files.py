"""Blocks on disks: what was written is read, or an error says where, what, how many bytes, and what to do."""

import errno
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jzero import block_files, scratch_file
from jzero.block_files import PIECE_BYTES, THREADS, BlockFiles, TierError, aligned

REMEDY = "go on from the last checkpoint"
SIZES = (0, 1, 4095, 4096, 4097, 65536, PIECE_BYTES, PIECE_BYTES + 1)


def contents(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def unaligned(nbytes):
    return aligned(nbytes + 1)[1:]


def home(directory):
    (found,) = directory.iterdir()
    return found


def held(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of two pages, so that a small block has many."""
    monkeypatch.setattr(block_files, "PIECE_BYTES", 8192)


@pytest.fixture
def one(tmp_path, small_pieces):
    """Files with two blocks, of which "a" is written."""
    with BlockFiles([tmp_path], {"a": 50_000, "b": 50_000}, "run 1") as files:
        files.write("a", contents(50_000)).result()
        yield files


class TestRoundTrips:
    @pytest.mark.parametrize("disks", [1, 3])
    @pytest.mark.parametrize("memory", [aligned, unaligned])
    def test_blocks_of_any_size_come_back(self, tmp_path, disks, memory):
        sizes = {f"block {n}": n for n in SIZES}
        with BlockFiles([tmp_path / str(i) for i in range(disks)], sizes, "run") as files:
            for turn in range(2):  # the second replaces the first
                for name, n in sizes.items():
                    data = memory(n)
                    data[:] = contents(n, seed=turn)
                    files.write(name, data).result()
            for name, n in sizes.items():
                out = memory(n)
                files.read(name, out).result()
                np.testing.assert_array_equal(out, contents(n, seed=1))

    @pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_])
    def test_arrays_of_any_dtype_and_shape_come_back(self, tmp_path, dtype):
        data = contents(24).view(np.uint8).reshape(2, 3, 4).astype(dtype)
        with BlockFiles([tmp_path], {"x": data.nbytes, "one": 8}, "run") as files:
            files.write("x", data).result()
            files.write("one", np.array(7.0)).result()
            out, one = np.zeros_like(data), np.zeros(())
            files.read("x", out).result()
            files.read("one", one).result()
        np.testing.assert_array_equal(out, data)
        assert one == 7

    def test_plain_files_serve_where_there_are_no_direct_ones(self, tmp_path, monkeypatch, small_pieces):
        opened, flag = os.open, getattr(os, "O_DIRECT", 0)

        def without_direct(path, flags, *rest, **options):
            if flags & flag:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return opened(path, flags, *rest, **options)

        monkeypatch.setattr(os, "open", without_direct)
        with BlockFiles([tmp_path], {"a": 50_001}, "run") as files:
            assert not files._files[0].direct
            files.write("a", contents(50_001)).result()
            out = unaligned(50_001)
            files.read("a", out).result()
            assert not vars(files._buffers)
        np.testing.assert_array_equal(out, contents(50_001))

    def test_many_blocks_in_flight(self, tmp_path, small_pieces):
        sizes = {str(i): 3000 * i for i in range(40)}
        with BlockFiles([tmp_path / "1", tmp_path / "2"], sizes, "run") as files:
            written = [files.write(name, contents(n, seed=n)) for name, n in sizes.items()]
            outs = {name: np.zeros(n, np.uint8) for name, n in sizes.items()}
            read = [files.read(name, outs[name]) for name in sizes]
            assert [future.result() for future in (*written, *read)] == [None] * 80
        for name, n in sizes.items():
            np.testing.assert_array_equal(outs[name], contents(n, seed=n))

    def test_what_is_asked_of_a_block_is_done_in_order(self, one, monkeypatch):
        plain, go = os.pwritev, threading.Event()
        monkeypatch.setattr(os, "pwritev", lambda *a: go.wait(10) and plain(*a))
        outs = [np.zeros(50_000, np.uint8) for _ in range(3)]
        under_way = [one.read("a", outs[0])]
        for seed, out in enumerate(outs[1:], 1):
            under_way += [one.write("a", contents(50_000, seed)), one.read("a", out)]
        under_way[0].result(10)
        assert not any(future.done() for future in under_way[1:])
        go.set()
        [future.result(10) for future in under_way]
        for seed, out in enumerate(outs):
            np.testing.assert_array_equal(out, contents(50_000, seed))

    def test_a_block_waits_for_no_other(self, one, monkeypatch):
        plain, go = os.pwritev, threading.Event()
        monkeypatch.setattr(os, "pwritev", lambda *a: go.wait(10) and plain(*a))
        writing = one.write("b", contents(50_000))
        one.read("a", np.zeros(50_000, np.uint8)).result(10)
        assert not writing.done()
        go.set()


class TestAlignment:
    """What is taken without a copy is what the disk's driver took when it was asked."""

    @pytest.mark.parametrize("needed", [16, 512, 4096, None])  # None: it refuses all
    def test_of_memory_is_what_the_disk_asks(self, tmp_path, monkeypatch, needed):
        opened, moves = os.open, {name: getattr(os, name) for name in ("pwritev", "preadv")}
        asked, refused = [], OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        def strict(name):
            def call(fd, views, offset):
                address = np.frombuffer(views[0], np.uint8).ctypes.data
                asked.append(address)
                if (needed is None and asking) or (needed and (address % needed or (len(views[0]) | offset) % 4096)):
                    raise refused
                return moves[name](fd, views, offset)

            return call

        asking = True
        monkeypatch.setattr(os, "O_DIRECT", flag := 0o40000000, raising=False)
        monkeypatch.setattr(os, "open", lambda path, flags, *a, **k: opened(path, flags & ~flag, *a, **k))
        for name in moves:
            monkeypatch.setattr(os, name, strict(name))
        with BlockFiles([tmp_path], {"a": 3 * PIECE_BYTES + 5}, "run") as files:
            asking = False
            assert asked
            (file,) = files._files
            assert file.direct == bool(needed)
            for shift in (0, 16, 64, 512, 1):
                data = aligned(3 * PIECE_BYTES + 4096)[shift:][: 3 * PIECE_BYTES + 5]
                data[:] = contents(data.nbytes, shift)
                files.write("a", data).result(10)
                data[:] = 0
                files.read("a", data).result(10)
                np.testing.assert_array_equal(data, contents(data.nbytes, shift))
                assert file.takes(data[:4096]) == (shift % (needed or 1) == 0)


class TestStriping:
    def test_a_block_lies_on_all_disks_alike(self, tmp_path, small_pieces):
        paths = [tmp_path / str(i) for i in range(3)]
        with BlockFiles(paths, {"a": 9 * 8192, "small": 3 * 4096}, "run"):
            assert [(home(path) / "blocks").stat().st_size for path in paths] == [3 * 8192 + 4096] * 3

    def test_small_blocks_begin_on_every_disk_in_turn(self, tmp_path):
        paths = [tmp_path / str(i) for i in range(3)]
        with BlockFiles(paths, {str(i): 100 for i in range(6)}, "run"):
            assert [(home(path) / "blocks").stat().st_size for path in paths] == [2 * 4096] * 3

    def test_all_disks_read_at_the_same_time(self, tmp_path, small_pieces, monkeypatch):
        plain, together = os.preadv, threading.Barrier(3 * THREADS, timeout=10)
        with BlockFiles([tmp_path / str(i) for i in range(3)], {"a": 3 * THREADS * 8192}, "run") as files:
            files.write("a", contents(3 * THREADS * 8192)).result()
            monkeypatch.setattr(os, "preadv", lambda *a: (together.wait(), plain(*a))[1])
            files.read("a", aligned(3 * THREADS * 8192)).result()

    @pytest.mark.parametrize("disks", [1, 3])
    def test_what_files_reserve_is_told_before(self, tmp_path, disks):
        sizes = {f"block {n}": n for n in SIZES}
        paths = [tmp_path / str(i) for i in range(disks)]
        with BlockFiles(paths, sizes, "run"):
            held_bytes = sum((home(path) / "blocks").stat().st_size for path in paths)
        assert block_files.reserved_bytes(sizes, disks) == held_bytes > sum(sizes.values())

    def test_no_piece_lies_on_another(self):
        sizes = {str(i): n for i, n in enumerate((*SIZES, 5 * PIECE_BYTES, 12_345))}
        blocks, ends = block_files._laid_out(sizes, 3)
        spans = sorted((p.disk, p.offset, p.offset + p.stop - p.start) for pieces in blocks.values() for p in pieces)
        for (disk, _, stop), (next_disk, start, _) in itertools.pairwise(spans):
            assert disk != next_disk or stop <= start
        assert all(start % 4096 == 0 and stop <= ends[disk] for disk, start, stop in spans)
        assert {name: sum(p.stop - p.start for p in pieces) for name, pieces in blocks.items()} == sizes


class TestMemory:
    def test_buffers_are_bounded(self, tmp_path, monkeypatch):
        sizes = {str(i): 3 * PIECE_BYTES for i in range(3)}
        data, made = {name: unaligned(n) for name, n in sizes.items()}, []
        monkeypatch.setattr(block_files, "aligned", lambda n: made.append(n) or aligned(n))
        with BlockFiles([tmp_path], sizes, "run") as files:
            for name in sizes:
                files.write(name, data[name])
                files.read(name, data[name])
        assert 0 < sum(made) <= files.buffer_bytes == 4 * PIECE_BYTES

    def test_aligned_memory_needs_none(self, tmp_path, monkeypatch):
        data = aligned(3 * PIECE_BYTES)
        monkeypatch.setattr(block_files, "aligned", None)
        with BlockFiles([tmp_path], {"a": data.nbytes}, "run") as files:
            files.write("a", data).result()
            files.read("a", data).result()

    def test_a_callers_memory_is_let_go_of_when_its_future_is_done(self, one):
        data = aligned(50_000)
        alive = weakref.ref(data.base)
        for call in (one.write, one.read, one.write):
            call("a", data)
        done = one.read("a", data)
        done.result()
        del data
        one.write("b", contents(50_000)).result()  # every thread has something else to do
        gc.collect()
        assert alive() is None

    def test_a_future_that_failed_has_no_thread_at_its_buffer(self, one, monkeypatch):
        plain, slow, failed = os.preadv, threading.Event(), threading.Event()

        def first_fails(fd, views, offset):
            if offset == 0:
                failed.set()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            slow.wait(10)
            return plain(fd, views, offset)

        monkeypatch.setattr(os, "preadv", first_fails)
        done = one.read("a", np.zeros(50_000, np.uint8))
        failed.wait(10)
        assert not done.done()
        slow.set()
        with pytest.raises(TierError, match="Input/output error"):
            done.result(10)


class TestMistakesOfTheCaller:
    def test_a_block_that_was_never_written(self, one):
        with pytest.raises(TierError, match="block 'b' was never written"):
            one.read("b", np.zeros(50_000, np.uint8))

    @pytest.mark.parametrize(
        ("name", "array", "said"),
        [
            ("c", np.zeros(5), r"there is no block 'c'; there are 2: a, b"),
            ("a", np.zeros(5, np.uint8), r"block 'a' has 50,000 bytes, and the array has 5"),
            ("a", np.zeros((250, 400), np.uint8)[:, ::2], r"block 'a': the array is not contiguous"),
        ],
    )
    def test_an_array_that_does_not_fit(self, one, name, array, said):
        for call in (one.read, one.write):
            with pytest.raises(ValueError, match=said):
                call(name, array)
        one.read("a", np.zeros(50_000, np.uint8)).result()  # nothing has failed

    def test_a_read_only_array_can_be_written_from_and_not_read_into(self, one):
        data = contents(50_000)
        data.flags.writeable = False
        one.write("a", data).result()
        with pytest.raises(ValueError, match="read-only"):
            one.read("a", data)

    def test_a_directory_given_twice(self, tmp_path):
        for paths in ([], [tmp_path, f"{tmp_path}/"]):
            with pytest.raises(ValueError, match="name at least one, and each once"):
                BlockFiles(paths, {"a": 1}, "run")
        assert held(tmp_path) == []

    def test_closed(self, one):
        one.close()
        one.close()
        with pytest.raises(TierError, match="closed"):
            one.write("a", contents(50_000))


def fails(future, files, *said):
    """The future has failed with a message that says all of `said` in one line, and so does whatever is asked next."""
    with pytest.raises(TierError) as error:
        future.result(10)
    message = str(error.value)
    assert all(text in message for text in (*said, REMEDY)), message
    assert "\n" not in message
    for call in (files.read, files.write):
        with pytest.raises(TierError) as later:
            call("b", np.zeros(50_000, np.uint8))
        assert str(later.value) == message


class TestFaultsOfTheDisk:
    def test_a_disk_too_small_is_an_error_before_anything_is_written(self, tmp_path, monkeypatch):
        first, second = tmp_path / "1", tmp_path / "2"
        room = {"1": 13, "2": 12}
        monkeypatch.setattr(os, "statvfs", lambda at: SimpleNamespace(f_bavail=room[at.parent.name], f_frsize=1000))
        with pytest.raises(TierError) as error:
            BlockFiles([first, second], {"a": 8192, "b": 16_384}, "run")
        assert str(error.value) == (
            f"{second}: 12,288 bytes are needed and 12,000 are free; free space there, or name more or larger disks"
        )
        assert held(first) == held(second) == []

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_a_disk_that_fills_while_space_is_reserved(self, tmp_path, monkeypatch, number):
        reserve = os.posix_fallocate

        def second_fails(fd, offset, nbytes):
            if str(tmp_path / "2") in str(Path(f"/proc/self/fd/{fd}").readlink()):
                raise OSError(number, os.strerror(number))
            reserve(fd, offset, nbytes)

        other = BlockFiles([tmp_path / "2"], {"a": 8192}, "other")
        monkeypatch.setattr(os, "posix_fallocate", second_fails)
        with other, pytest.raises(TierError) as error:
            BlockFiles([tmp_path / "1", tmp_path / "2"], {"a": 8192}, "run")
        said = str(error.value)
        assert f"{tmp_path / '2'}: 4,096 bytes are needed and" in said
        assert "jzero-tier-* of other runs hold 8,192)" in said
        assert held(tmp_path / "1") == held(tmp_path / "2") == []

    @pytest.mark.parametrize(
        ("number", "remedy"), [(errno.ENOSPC, "free space there"), (errno.EFBIG, "free space"), (errno.EIO, "check")]
    )
    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_an_error_of_the_system(self, one, tmp_path, monkeypatch, verb, number, remedy):
        def broken(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, {"read": "preadv", "write": "pwritev"}[verb], broken)
        future = getattr(one, verb)("a", np.zeros(50_000, np.uint8))
        fails(future, one, str(home(tmp_path) / "blocks"), "block 'a'", "8,192 bytes", os.strerror(number), remedy)

    def test_an_error_that_is_not_the_systems(self, one, monkeypatch):
        def no_memory(_):
            raise MemoryError("none left")

        monkeypatch.setattr(block_files, "aligned", no_memory)
        one._buffers = threading.local()
        future = one.write("a", unaligned(50_000))
        with pytest.raises(TierError, match=r"block 'a': MemoryError\('none left'\)"):
            future.result(10)
        with pytest.raises(TierError, match="MemoryError"):
            one.read("a", unaligned(50_000))

    def test_what_is_queued_fails_with_the_first_error(self, one, monkeypatch):
        go = threading.Event()

        def full(*_):
            go.wait(10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "pwritev", full)
        queued = [one.write(name, contents(50_000)) for name in "aab"]
        queued.append(one.read("a", np.zeros(50_000, np.uint8)))
        go.set()
        for future in queued:
            assert "No space left" in str(future.exception(10))


def in_parts(plain, share):
    """A call that moves only a part of what it is asked for, and counts its calls."""

    def call(fd, views, offset):
        call.calls += 1
        (view,) = views
        return plain(fd, [view[: share(len(view))]], offset)

    call.calls = 0
    return call


class TestShortTransfers:
    @pytest.mark.parametrize("share", [lambda n: max(4096, n // 2), lambda n: min(n, 5000)], ids=["half", "odd"])
    @pytest.mark.parametrize("direct", [True, False])
    @pytest.mark.parametrize("call", ["pwritev", "preadv"])
    def test_are_gone_on_with(self, tmp_path, monkeypatch, share, direct, call):
        if not direct:
            monkeypatch.setattr(os, "O_DIRECT", 0)
        with BlockFiles([tmp_path], {"a": 50_001}, "run") as files:
            plain = getattr(os, call)
            parts = in_parts(plain, share)
            if files._files[0].direct:  # the system itself would refuse what is not aligned
                parts = in_parts(lambda fd, v, o: plain(fd, [v[0][: len(v[0]) // 4096 * 4096]], o), share)
            monkeypatch.setattr(os, call, parts)
            files.write("a", contents(50_001)).result(10)
            out = aligned(50_001)
            files.read("a", out).result(10)
        np.testing.assert_array_equal(out, contents(50_001))
        assert parts.calls > 2

    @pytest.mark.parametrize("call", ["write", "read"])
    @pytest.mark.parametrize("moved", [0, 100])
    def test_without_progress_are_errors(self, one, tmp_path, monkeypatch, call, moved):
        if moved and not one._files[0].direct:
            pytest.skip("a plain file goes on from any byte")
        monkeypatch.setattr(os, {"read": "preadv", "write": "pwritev"}[call], lambda *_: moved)
        future = getattr(one, call)("a", np.zeros(50_000, np.uint8))
        fails(future, one, str(home(tmp_path)), "block 'a'", "8,192 bytes", "ended after 0", "check the disk")


class TestFilesThatOthersTouch:
    def test_a_truncated_file(self, one, tmp_path):
        os.truncate(home(tmp_path) / "blocks", 10_000)
        future = one.read("a", np.zeros(50_000, np.uint8))
        fails(future, one, str(home(tmp_path)), "block 'a'", "10,000 bytes, not 106,496", "truncated")

    @pytest.mark.parametrize("call", ["read", "write"])
    def test_a_file_that_was_truncated_and_has_grown_again(self, one, tmp_path, call):
        path = home(tmp_path) / "blocks"
        size = path.stat().st_size
        os.truncate(path, 8192)
        os.truncate(path, size)
        future = getattr(one, call)("a", np.zeros(50_000, np.uint8))
        fails(future, one, str(path), "block 'a'", "not 106,496", "truncated")

    @pytest.mark.parametrize("gone", ["file", "directory", "parent"])
    @pytest.mark.parametrize("call", ["read", "write"])
    def test_a_file_or_directory_that_was_removed(self, tmp_path, small_pieces, gone, call):
        files = BlockFiles([tmp_path / "tier"], {"a": 50_000, "b": 50_000}, "run")
        files.write("a", contents(50_000)).result()
        path = home(tmp_path / "tier") / "blocks"
        if gone == "file":
            path.unlink()
        else:
            shutil.rmtree(path.parent if gone == "directory" else path.parents[1])
        fails(getattr(files, call)("a", np.zeros(50_000, np.uint8)), files, str(path), "block 'a'", "was removed")
        files.close()

    def test_a_directory_in_which_another_runs_now_is(self, tmp_path, small_pieces):
        first = BlockFiles([tmp_path / "1"], {"a": 50_000, "b": 50_000}, "run 1")
        first.write("a", contents(50_000)).result()
        with BlockFiles([tmp_path / "2"], {"a": 50_000}, "run 2"):
            mine, theirs = home(tmp_path / "1"), home(tmp_path / "2")
            shutil.move(mine, tmp_path / "elsewhere")
            shutil.copytree(theirs, mine)
            fails(first.read("a", np.zeros(50_000, np.uint8)), first, str(mine), "block 'a'", 'now of "run 2"')
            first.close()


ANOTHER = """
import sys
import numpy as np
from jzero.block_files import BlockFiles
files = BlockFiles([sys.argv[1]], {"a": 50_000}, "another")
files.write("a", np.full(50_000, 7, np.uint8)).result()
print("written", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.readline()
    out = np.zeros(50_000, np.uint8)
    files.read("a", out).result()
    print(set(out.tolist()), flush=True)
"""


def another(directory, what):
    """Another process that has written a block."""
    process = subprocess.Popen(
        [sys.executable, "-c", ANOTHER, str(directory), what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    return process


class TestRunsThatShareADirectory:
    def test_do_not_meet(self, tmp_path):
        with (
            BlockFiles([tmp_path], {"a": 5000}, "same owner") as first,
            BlockFiles([tmp_path], {"a": 5000}, "same owner") as second,
        ):
            for files, seed in ((first, 1), (second, 2)):
                files.write("a", contents(5000, seed)).result()
            out = np.zeros(5000, np.uint8)
            first.read("a", out).result()
            np.testing.assert_array_equal(out, contents(5000, 1))
        assert held(tmp_path) == []

    def test_leave_a_living_process_alone_and_remove_what_a_dead_one_left(self, tmp_path):
        with another(tmp_path, "wait") as process:
            (theirs,) = held(tmp_path)
            assert json.loads((tmp_path / theirs / "owner").read_text())["owner"] == "another"
            with BlockFiles([tmp_path], {"a": 5000}, "run"):
                assert len(held(tmp_path)) == 2
            assert held(tmp_path) == [theirs]
            assert process.communicate("go on\n") == ("{7}\n", None)
        assert process.returncode == 0
        assert held(tmp_path) == []
        with another(tmp_path, "wait") as process:
            process.send_signal(signal.SIGKILL)
        (theirs,) = held(tmp_path)
        with BlockFiles([tmp_path], {"a": 5000}, "run"):
            assert len(held(tmp_path)) == 1
            assert not (tmp_path / theirs).exists()

    @pytest.mark.parametrize("owner", [None, "", '{"host": "elsewhere"}', "[]"])
    def test_leave_alone_what_is_not_known_to_be_dead(self, tmp_path, owner):
        (tmp_path / "jzero-tier-x").mkdir()
        (tmp_path / "jzero-tier-x" / "blocks").touch()
        if owner is not None:
            (tmp_path / "jzero-tier-x" / "owner").write_text(owner)
        (tmp_path / "mine.txt").touch()
        with BlockFiles([tmp_path], {"a": 5000}, "run"):
            pass
        assert held(tmp_path) == ["jzero-tier-x", "mine.txt"]

    def test_remove_nothing_of_theirs_in_a_fork(self, tmp_path):
        with BlockFiles([tmp_path], {"a": 5000}, "run"):
            file = scratch_file.ScratchFile(tmp_path, 4096, "run")
            lock = scratch_file.FileLock(file.path.with_name("lock"), thread_local=False)
            scratch_file._remove(file.path.parent, lock, os.getpid() + 1)  # made by the parent of this process
            assert file.path.exists()
            file.close()

    def test_end_with_their_object(self, tmp_path):
        files = BlockFiles([tmp_path], {"a": 5000}, "run")
        assert len(held(tmp_path)) == 1
        del files
        gc.collect()
        assert held(tmp_path) == []


class TestDirectories:
    def test_are_made_and_their_parents_are_not(self, tmp_path):
        with BlockFiles([str(tmp_path / "new")], {"a": 1}, "run"):
            assert len(held(tmp_path / "new")) == 1
        with pytest.raises(TierError, match=f"{tmp_path / 'no'} is not there; make it, or mount the disk"):
            BlockFiles([tmp_path / "no" / "tier"], {"a": 1}, "run")

    def test_that_are_files_are_named(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(TierError, match=f"{tmp_path / 'file'}: File exists; name a directory"):
            BlockFiles([tmp_path / "file"], {"a": 1}, "run")

    @pytest.mark.parametrize(
        "refusal",
        [OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)), NotImplementedError("no flock")],
        ids=["os", "none"],
    )
    def test_without_locks_are_refused_and_left_as_they_were(self, tmp_path, monkeypatch, refusal):
        dead = tmp_path / "jzero-tier-x"
        dead.mkdir()
        (dead / "owner").write_text(json.dumps({"host": scratch_file.platform.node()}))

        def acquire(*_, **__):
            raise refusal

        monkeypatch.setattr(scratch_file.FileLock, "acquire", acquire)
        with pytest.raises(TierError, match=f"{tmp_path}: a file cannot be locked there: .*; name a directory"):
            BlockFiles([tmp_path], {"a": 1}, "run")
        assert held(tmp_path) == ["jzero-tier-x"]

    def test_relative_names_hold_when_the_process_moves(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "elsewhere").mkdir()
        with BlockFiles(["tier"], {"a": 5000}, "run") as files:
            monkeypatch.chdir("elsewhere")
            files.write("a", contents(5000)).result()
        assert held(Path(tmp_path) / "tier") == []
