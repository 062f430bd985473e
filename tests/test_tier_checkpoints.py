"""A checkpoint does not tell where the state rested: what is saved from one place comes back to any other."""

import dataclasses
import functools
import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_decoder import batches, decoder
from tiny_stack import stack

import jzero
from jzero import checksums, piecewise, stored
from jzero.in_chunks import chunk_shape, in_chunks
from jzero.models.decoder import next_token_loss
from jzero.offload import at_rest
from jzero.offload.groups import boxes
from jzero.offload.pieces import Pieces
from jzero.stored import CheckpointError

ROWS, GROUP = 16, 9_000  # bytes: less than some parameters have on one device, so there are pieces
DATA = batches(3, ROWS)
BF16 = jzero.Precision(params="bfloat16")
HOST = {"optimizer": "host", "group_size": GROUP}
CPU = {**HOST, "update": "cpu"}
LAYOUTS = {
    "none": ("dp=8", 3, {}),
    "device": ("dp=4,tp=2", 1, {**HOST, "optimizer": "device"}),
    "host": ("dp=4,tp=2", 3, HOST),
    "cpu": ("dp=4,tp=2", 3, CPU),
    "nvme": ("dp=4,tp=2", 3, {**HOST, "optimizer": "nvme"}),
    "nvme and cpu": ("node=2,dp=4", 2, {**CPU, "optimizer": "nvme"}),
    "params, too": ("dp=8", 3, {**HOST, "params": "host", "min_param_bytes": 0}),
    "params in files": ("dp=8", 3, {**HOST, "optimizer": "nvme", "params": "nvme", "min_param_bytes": 0}),
    "other pieces": ("dp=4,tp=2", 3, {**HOST, "group_size": 2_000}),
    "other mesh": ("node=2,dp=4", 2, HOST),
    "one device": ("dp=1", 0, HOST),
    "one device, none": ("dp=1", 0, {}),
}
SAVED = ("none", "host", "cpu", "nvme", "params, too", "params in files", "device", "nvme and cpu")
QUICK = {
    *(("none", new) for new in ("host", "nvme", "params, too")),
    *(("host", new) for new in ("none", "host", "other pieces", "one device")),
    *(("cpu", "nvme"), ("nvme", "one device, none"), ("nvme", "nvme"), ("params, too", "none")),
    *(("none", "params in files"), ("params in files", "params in files"), ("params in files", "none")),
}
NEXT = {("none", "host"), ("host", "host"), ("host", "none"), ("nvme", "nvme"), ("params, too", "none")}
NEXT |= {("params in files", "none"), ("none", "params in files")}  # step on

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    @functools.cache
    def of(layout: str, **options: Any) -> jzero.Run:
        axes, stage, placement = LAYOUTS[layout]
        if "nvme" in placement.values():
            placement = {**placement, "dir": (str(tmp_path_factory.mktemp("tier")),)}
        mesh = jzero.make_mesh(axes, jax.devices()[: 1 if axes == "dp=1" else 8])
        tx = optax.adamw(1e-3)
        return jzero.setup(
            stack(4), next_token_loss, tx, mesh, DATA[0], stage=stage, offload=jzero.Offload(**placement), **options
        )

    return of


@pytest.fixture(scope="module")
def saved(run_of, tmp_path_factory):
    """Layout -> (directory, arrays that were saved, loss of the next step)."""

    @functools.cache
    def of(layout: str) -> tuple[Path, dict[str, np.ndarray], float]:
        run, directory = run_of(layout), tmp_path_factory.mktemp("saved")
        state, _ = run.step(run.init(), DATA[0])
        as_saved = arrays(state)
        with jzero.Checkpoints(directory) as checkpoints:
            checkpoints.save(1, state)
        _, metrics = run.step(state, DATA[1])
        return directory, as_saved, float(metrics["loss"])

    return of


def arrays(state: jzero.TrainState) -> dict[str, np.ndarray]:
    return {name: np.asarray(at_rest.on_device(x)).copy() for name, x in stored.leaves(state).items()}


def assert_same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x, err_msg=name)


PAIRS = [
    pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow) for pair in itertools.product(SAVED, LAYOUTS)
]


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_state_comes_back_to_wherever_it_is_to_rest(old, new, saved, run_of):
    directory, as_saved, loss = saved(old)
    run = run_of(new)
    restored = jzero.Checkpoints(directory).restore(run.abstract_state)
    assert_same(arrays(restored.state), as_saved)
    for got, wanted in zip(leaves(restored.state), leaves(run.abstract_state), strict=True):
        assert got.sharding == wanted.sharding
        assert isinstance(got, Pieces) == hasattr(wanted, "fills")
    if (old, new) in NEXT:
        _, metrics = run.step(restored.state, DATA[1])
        np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=0 if old == new else 1e-5)


def leaves(state: jzero.TrainState) -> list[Any]:
    return list(stored.leaves(state).values())


def test_what_is_restored_rests_where_what_is_born_does(saved, run_of):
    for layout in ("host", "cpu", "nvme"):
        run = run_of(layout)
        restored = jzero.Checkpoints(saved("none")[0]).restore(run.abstract_state).state
        born = run.init()
        assert jax.tree.structure(restored) == jax.tree.structure(born)
        for got, wanted in zip(jax.tree.leaves(restored.opt_state), jax.tree.leaves(born.opt_state), strict=True):
            assert type(got) is type(wanted)
            if isinstance(got, jax.Array):
                assert (got.sharding, got.shape, got.dtype) == (wanted.sharding, wanted.shape, wanted.dtype)


def test_checkpoints_hold_the_same_names_shapes_and_checksums_wherever_the_state_rested(run_of, saved, tmp_path):
    """The state of one run, saved by others."""
    found = {}
    for layout in ("none", "host", "nvme"):
        state = jzero.Checkpoints(saved("none")[0]).restore(run_of(layout).abstract_state).state
        with jzero.Checkpoints(tmp_path / layout) as checkpoints:
            checkpoints.save(1, state)
        found[layout] = sums(tmp_path / layout / "1")
    assert found["host"] == found["none"] == found["nvme"]


def sums(step: Path) -> dict[str, int]:
    return json.loads((step / "seal.json").read_text())["checksums"]


def test_float32_becomes_masters_on_the_host_and_comes_back(saved, run_of, tmp_path):
    directory, as_saved, _ = saved("none")
    narrow = run_of("host", precision=BF16)
    restored = jzero.Checkpoints(directory).restore(narrow.abstract_state)
    assert "'params/" in restored.converted
    with jzero.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, restored.state)
    assert_same(arrays(jzero.Checkpoints(tmp_path).restore(run_of("host").abstract_state).state), as_saved)


@pytest.mark.parametrize("layout", ["none", "host", "nvme"])
def test_a_flipped_bit_of_a_piece_is_found(layout, saved, run_of, tmp_path):
    run = run_of(layout)
    state = jzero.Checkpoints(saved("none")[0]).restore(run_of("host").abstract_state).state
    with jzero.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    name = "opt_state/0/mu/layers/up"
    flip(tmp_path / "1" / "state", saved("none")[1][name].reshape(-1)[:8].tobytes())
    with pytest.raises(CheckpointError, match=f"'{name}' is not what was saved"):
        jzero.Checkpoints(tmp_path).restore(run.abstract_state)


def flip(directory: Path, content: bytes) -> None:
    """Changes a bit of some array data, wherever it lies; no size changes."""
    holding = [path for path in directory.glob("**/d/*") if content in path.read_bytes()]
    assert holding
    for path in holding:
        found = bytearray(path.read_bytes())
        found[found.index(content)] ^= 1
        path.write_bytes(found)


def test_parameters_in_pinned_host_memory_are_saved_and_come_back_there(run_of, saved, tmp_path):
    """Plain arrays: whoever puts them there."""
    run = run_of("none")

    def pinned(x: Any) -> NamedSharding:
        return x.sharding.with_memory_kind("pinned_host")

    restored = jzero.Checkpoints(saved("none")[0]).restore(run.abstract_state).state
    params = jax.tree.map(lambda x: jax.device_put(x, pinned(x)), restored.params)
    with jzero.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, dataclasses.replace(restored, params=params))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pinned(x)), run.abstract_state.params
    )
    again = checkpoints.restore(dataclasses.replace(run.abstract_state, params=abstract)).state
    for got, wanted in zip(jax.tree.leaves(again.params), jax.tree.leaves(params), strict=True):
        assert got.sharding == wanted.sharding
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
    assert sums(tmp_path / "1") == sums(saved("none")[0] / "1")


def test_a_state_in_files_that_was_overwritten_is_not_saved(run_of, tmp_path):
    run = run_of("nvme")
    state = run.init()
    run.init()
    with pytest.raises(ValueError, match="overwritten by a later step, or by a newer state"):
        jzero.Checkpoints(tmp_path).save(1, state)


def test_saving_and_restoring_hold_a_few_pieces_in_memory(tmp_path, monkeypatch):
    """Files to files: no part of the state is in memory before or after."""
    monkeypatch.setattr(piecewise, "_AT_ONCE_BYTES", 2**16)
    group, rows = 2**16, batches(1, 8)
    placement = jzero.Offload("nvme", dir=(str(tmp_path / "tier"),), group_size=group)
    mesh = jzero.make_mesh("dp=1", jax.devices()[:1])
    model = decoder(width=256, mlp_width=1024, layers=3)
    run = jzero.setup(model, next_token_loss, optax.adam(1e-3), mesh, rows[0], offload=placement)
    state = run.init()
    nbytes = run.tier_bytes()["opt_state"]["nvme"]
    assert nbytes > 200 * group
    with jzero.Checkpoints(tmp_path / "steps", keep=1) as checkpoints:
        checkpoints.save(1, state)  # compiles what sums up
        for work in (lambda: checkpoints.save(2, state), lambda: checkpoints.restore(run.abstract_state)):
            assert group / 4 < most_held(work, monkeypatch) < 3 * group


def most_held(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of host arrays that jzero has made and that live, at most, when a box is summed up; one of 50."""
    counts, held, of_box = itertools.count(), [0], checksums.of_box
    ours = [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain), tracemalloc.Filter(True, "*/jzero/*")]

    def counting(*args: Any) -> int:
        if next(counts) % 50 == 0:
            traces = tracemalloc.take_snapshot().filter_traces(ours[:1]).filter_traces(ours[1:]).traces
            held.append(sum(trace.size for trace in traces))
        return of_box(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checksums, "of_box", counting)
        tracemalloc.start()
        try:
            work()
        finally:
            tracemalloc.stop()
    assert next(counts) > 300
    return max(held)


def test_an_average_in_pieces_comes_to_rest_as_parameters():
    tx = jzero.averaged(optax.adamw(1e-2), 0.9)
    run = jzero.setup(stack(), next_token_loss, tx, "dp=8", DATA[0], offload=jzero.Offload(**HOST))
    state, _ = run.step(run.init(), DATA[0])
    average, found = arrays(state), arrays(run.averaged(state))
    names = [name for name in found if name.startswith("params/")]
    for name in names:
        np.testing.assert_array_equal(found[name], average[name.replace("params/", "opt_state/average/")])
        assert not np.array_equal(found[name], average[name])
    for got, wanted in zip(*(jax.tree.leaves(s.params) for s in (run.averaged(state), state)), strict=True):
        assert got.sharding == wanted.sharding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float8_e4m3fn", "int4"])
def test_boxes_add_up_to_the_checksum_of_the_array(dtype):
    shape = (8, 6, 5)
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 7, shape)
    x = np.asarray(jnp.asarray(values).astype(dtype))
    place = NamedSharding(jzero.make_mesh("dp=8"), P("dp"))
    whole = int(checksums.checksums({"x": jax.device_put(x, place)})["x"])
    for most in (1, 4, 7, 60, 1000):
        parts = list(boxes(shape, most))
        added = [
            checksums.of_box(x[tuple(slice(a, a + n) for a, n in zip(start, box, strict=True))], start, shape)
            for start, box in parts
        ]
        assert checksums.total(added) == whole
        assert len(parts) == 1 or checksums.total(added[:-1]) != whole


@pytest.mark.parametrize(
    ("shape", "shard"), [((12, 5), (3, 5)), ((7, 4), (7, 4)), ((2, 6, 4), (2, 3, 4)), ((2, 9, 8), (2, 9, 4)), ((), ())]
)
@pytest.mark.parametrize("piece", [1, 5, 11, 100])
@pytest.mark.parametrize("most", [1, 6, 13, 100])
def test_chunks_make_up_the_array_that_the_pieces_were_of(shape, shard, piece, most):
    x = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    starts = list(itertools.product(*(range(0, size, part) for size, part in zip(shape, shard, strict=True))))
    chunk = chunk_shape(shape, shard, most)

    def box(start: Any, size: Any) -> np.ndarray:
        return x[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]

    shards = [box(start, shard) for start in starts]
    pieces = [
        [np.ascontiguousarray(s[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))]) for s in shards]
        for at, size in boxes(shard, piece)
    ]
    found = np.full(shape, -1, np.float32)
    for _, start, part in in_chunks(pieces, starts, shard, chunk):
        assert all(a % n == 0 for a, n in zip(start, chunk, strict=True))  # a chunk of the file, and all of it
        assert all(n == c or a + n == s for a, n, c, s in zip(start, part.shape, chunk, shape, strict=True))
        assert part.size <= most
        found[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
    np.testing.assert_array_equal(found, x)
