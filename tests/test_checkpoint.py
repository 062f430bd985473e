"""A train state comes back as it was saved: bit for bit, onto any stage and mesh, or not at all."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_decoder import batches, decoder

import jzero
from jzero import checkpoint, reader, stored
from jzero import checksums as sums
from jzero.checksums import checksums
from jzero.models.decoder import next_token_loss
from jzero.stored import MismatchError

ROWS, BEFORE, AFTER = 16, 3, 3
LAYOUTS = {"s3dp8": (3, "dp=8"), "s1dp4tp2": (1, "dp=4,tp=2"), "s2node2dp4": (2, "node=2,dp=4"), "one": (0, "dp=1")}
SAVED = ("s3dp8", "s1dp4tp2", "s2node2dp4")

needs_8 = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@functools.cache
def setup(layout, **options):
    stage, axes = LAYOUTS[layout]
    devices = jax.devices()[: int(np.prod([int(size) for size in axes.replace("=", ",").split(",")[1::2]]))]
    mesh = jzero.make_mesh(axes, devices)
    tx = optax.adamw(optax.linear_schedule(1e-3, 1e-4, 10))
    return jzero.setup(decoder(), next_token_loss, tx, mesh, DATA[0], stage=stage, clip_norm=1.0, **options)


DATA = batches(BEFORE + AFTER, ROWS)


def arrays(state):
    return {name: np.asarray(x) for name, x in stored.leaves(state).items()}


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x, err_msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> (directory, arrays that were saved, losses after that)."""
    found = {}
    for layout in SAVED:
        run = setup(layout)
        state, losses = run.init(), []
        directory = tmp_path_factory.mktemp(layout)
        with jzero.Checkpoints(directory) as checkpoints:
            for step, batch in enumerate(DATA, start=1):
                state, metrics = run.step(state, batch)
                losses.append(float(metrics["loss"]))
                if step == BEFORE:
                    as_saved = arrays(state)
                    checkpoints.save(step, state, {"samples": step * ROWS})
        found[layout] = directory, as_saved, losses[BEFORE:]
    return found


@needs_8
@pytest.mark.parametrize(("old", "new"), list(itertools.product(SAVED, LAYOUTS)))
def test_a_state_comes_back_on_every_stage_and_mesh(saved, old, new):
    directory, as_saved, losses = saved[old]
    run = setup(new)
    restored = jzero.Checkpoints(directory).restore(run.abstract_state)
    assert (restored.step, restored.about, restored.damaged) == (BEFORE, {"samples": BEFORE * ROWS}, ())
    assert_same(arrays(restored.state), as_saved)
    for got, wanted in zip(jax.tree.leaves(restored.state), jax.tree.leaves(run.abstract_state), strict=True):
        assert got.sharding == wanted.sharding
    state, got = restored.state, []
    for batch in DATA[BEFORE:]:
        state, metrics = run.step(state, batch)
        got.append(float(metrics["loss"]))
    np.testing.assert_allclose(got, losses, rtol=0 if old == new else 1e-5)


def test_a_save_is_of_the_state_it_was_given_though_that_is_donated_at_once(tmp_path):
    run = jzero.setup(decoder(), next_token_loss, optax.adamw(1e-2), "dp=-1", DATA[0], stage=1)
    state = run.init()
    with jzero.Checkpoints(tmp_path, keep=None) as checkpoints:
        as_saved = []
        for step, batch in enumerate(DATA, start=1):
            state, _ = run.step(state, batch)
            as_saved.append(arrays(state))
            checkpoints.save(step, state)
    for step, wanted in enumerate(as_saved, start=1):
        assert_same(arrays(checkpoints.restore(run.abstract_state, step).state), wanted)


BF16 = jzero.Precision(params="bfloat16")


@needs_8
def test_float32_becomes_bfloat16_with_masters_and_comes_back(saved, tmp_path):
    directory, as_saved, _ = saved["s3dp8"]
    narrow, wide = setup("s1dp4tp2", precision=BF16), setup("s2node2dp4")
    restored = jzero.Checkpoints(directory).restore(narrow.abstract_state)
    assert "'params/" in restored.converted
    got = arrays(restored.state)
    for name, x in as_saved.items():
        inner = name.removeprefix("params/")
        np.testing.assert_array_equal(got[f"master/{inner}" if inner != name else name], x, err_msg=name)
        if inner != name:
            np.testing.assert_array_equal(got[name], x.astype(jnp.bfloat16))
    with jzero.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(BEFORE, restored.state)
    assert_same(arrays(jzero.Checkpoints(tmp_path).restore(wide.abstract_state).state), as_saved)


def test_random_keys_and_counters_come_back(tmp_path):
    run = jzero.setup(decoder(dropout=0.1), next_token_loss, optax.sgd(0.1), "dp=-1", DATA[0])
    state, _ = run.step(run.init(), DATA[0])
    with jzero.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    state_again = checkpoints.restore(run.abstract_state).state
    assert jax.tree.structure(state_again) == jax.tree.structure(state)
    keys = [x for x in jax.tree.leaves(state_again) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert keys
    assert_same(arrays(state_again), arrays(state))


def mismatch(held, wanted):
    shapes = {"a": jax.ShapeDtypeStruct((2,), np.float32), "master/w": jax.ShapeDtypeStruct((3,), np.float32)}
    shapes |= {"params/w": jax.ShapeDtypeStruct((3,), jnp.bfloat16), "b": jax.ShapeDtypeStruct((4,), np.int32)}
    with pytest.raises(MismatchError) as found:
        stored.sources({k: shapes[k] for k in held}, wanted)
    return str(found.value)


def test_another_model_is_refused_by_leaf_and_shape():
    wanted = {"a": jax.ShapeDtypeStruct((5,), np.float32)}
    assert mismatch(["a"], wanted) == "'a' has shape (2,) in the checkpoint and (5,) in this run"
    assert "'a' of shape (5,) is not in the checkpoint" in mismatch([], wanted)
    same = {"a": jax.ShapeDtypeStruct((2,), np.float32)}
    assert "holds 'b', which this run does not have" in mismatch(["a", "b"], same)
    assert mismatch(["b"], {"b": jax.ShapeDtypeStruct((4,), np.float32)}).startswith("'b' is int32 in the checkpoint")


def test_a_leaf_in_another_precision_comes_from_its_master():
    f32, bf16 = jax.ShapeDtypeStruct((3,), np.float32), jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    narrow, wide = {"params/w": bf16, "master/w": f32}, {"params/w": f32}
    assert stored.sources(narrow, wide) == {"params/w": "master/w"}
    assert stored.sources(wide, narrow) == {"params/w": "params/w", "master/w": "params/w"}
    assert stored.sources(narrow, narrow) == {"params/w": "params/w", "master/w": "master/w"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float8_e4m3fn", "int8"])
def test_a_checksum_is_the_same_on_every_mesh_and_finds_every_change(dtype):
    count = jax.device_count()
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (count, 6, 4))
    x = jnp.asarray(x).astype(dtype)
    mesh, across = jzero.make_mesh(f"dp={count}"), jzero.make_mesh(f"tp={count}")
    places = [NamedSharding(mesh, P("dp")), NamedSharding(mesh, P()), NamedSharding(across, P(None, "dp", "node"))]
    values = {int(checksums({"x": jax.device_put(x, place)})["x"]) for place in places}
    assert len(values) == 1
    changed = np.asarray(x).copy()
    changed.reshape(-1).view(np.uint8)[17] ^= 1
    swapped = np.asarray(x)[:, ::-1]
    assert not values & {int(checksums({"x": jnp.asarray(y)})["x"]) for y in (changed, swapped)}


@pytest.mark.parametrize(("shape", "spec"), [((8, 6, 4), P("dp")), ((7,), P()), ((3, 8, 1), P(None, "dp")), ((), P())])
def test_a_checksum_is_the_same_in_pieces_of_any_size(monkeypatch, shape, spec):
    mesh = jzero.make_mesh(f"dp={jax.device_count()}")
    if jax.device_count() != 8:
        spec = P()
    x = jax.device_put(np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape), NamedSharding(mesh, spec))
    values = set()
    for piece in (1, 3, 10, 2**17):
        monkeypatch.setattr(sums, "_PIECE", piece)
        sums._over.cache_clear()
        values.add(int(checksums({"x": x})["x"]))
    sums._over.cache_clear()
    assert len(values) == 1


@needs_8
def test_an_array_may_be_larger_than_what_is_read_at_a_time_and_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_IN_PASSING_BYTES", 1)
    for module in (checkpoint, reader):
        monkeypatch.setattr(module, "CHUNK_BYTES", 256)
    old, new = setup("s1dp4tp2"), setup("one")
    state = old.init()
    with jzero.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    assert_same(arrays(checkpoints.restore(new.abstract_state).state), arrays(state))


class Odd(nnx.Module):
    """Names with slashes, arrays without elements, and dtypes that few have."""

    def __init__(self):
        self.inner = nnx.Dict({"a/b": nnx.Param(jnp.ones(8)), "a": nnx.Dict({"b": nnx.Param(jnp.full(8, 2.0))})})
        self.empty = nnx.Param(jnp.zeros((0, 4)))
        self.angles = nnx.Variable(jnp.exp(1j * jnp.arange(4)))
        self.narrow = nnx.Variable(jnp.arange(8).astype(jnp.int4))

    def __call__(self, x):
        return x * self.inner["a/b"][...] * self.inner["a"]["b"][...] + self.empty[...].sum()


def test_odd_names_and_dtypes_come_back(tmp_path):
    def loss(model, batch):
        return (model(batch["x"]) ** 2).sum(), batch["x"].shape[0]

    rows = {"x": np.ones((jax.device_count(), 8), np.float32)}
    run = jzero.setup(Odd, loss, optax.adamw(1e-2), "dp=-1", rows)
    state, _ = run.step(run.init(), rows)
    with jzero.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    again = checkpoints.restore(run.abstract_state).state
    for got, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert got.dtype == wanted.dtype
        assert got.sharding == wanted.sharding
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
