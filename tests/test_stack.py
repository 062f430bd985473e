"""The prefetching stack is the plain scan: the same gradients, the same bytes, two layers more of memory at most."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import one_device as single
import optax
import pytest
from flax import nnx
from tiny_decoder import batches, decoder, layer_bytes

import jzero
from jzero import hlo
from jzero.models.decoder import next_token_loss

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")
slow = pytest.mark.slow

RTOL = 1e-6
REMATS = ("none", "dots", "full")
MESHES = ("dp=8", "dp=4,tp=2")


def one_step(model_fn, loss_fn, mesh, data, **options):
    """Gradients, norm, loss and state of one step, and the loss in evaluation mode."""
    run = jzero.setup(model_fn, loss_fn, single.recording(optax.adamw(1e-3)), mesh, data, **options)
    return single.train(run, [data]), float(run.evaluate(run.init(), data)["loss"])


def assert_same(got, wanted):
    single.assert_gradients_equal(got[0], wanted[0], RTOL)
    np.testing.assert_allclose([*got[0].losses, got[1]], [*wanted[0].losses, wanted[1]], rtol=RTOL)
    for path, x in wanted[0].state.items():
        np.testing.assert_allclose(got[0].state[path], x, rtol=RTOL, err_msg=str(path))


def assert_prefetching_changes_nothing(mesh, ahead=1, micro_batches=1, sizes=None, **options):
    sizes = {"layers": 4, "dropout": 0.1} | (sizes or {})
    (data,) = batches(1, 8 * micro_batches)
    plain, prefetching = (
        one_step(decoder(layers_ahead=k, **sizes), next_token_loss, mesh, data, micro_batches=micro_batches, **options)
        for k in (0, ahead)
    )
    assert_same(prefetching, plain)


# ---- the decoder ----------------------------------------------------------------------------------------------------

CELLS = list(itertools.product((0, 1, 2, 3), REMATS, MESHES))
BY_CELL = ("stage", "remat", "mesh")
QUICK = [
    (0, "dots", "dp=8"),
    (1, "full", "dp=4,tp=2"),
    (3, "none", "dp=8"),
    (3, "full", "dp=4,tp=2"),
    (2, "dots", "dp=4,tp=2"),
    (3, "dots", "dp=8"),
]


@pytest.mark.parametrize(
    ("stage", "remat", "mesh"), [pytest.param(*c, marks=[] if c in QUICK else slow) for c in CELLS]
)
def test_gradients_equal_the_plain_scan(stage, remat, mesh):
    assert_prefetching_changes_nothing(mesh, stage=stage, sizes={"remat": remat})


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("dp=8", {"zero": jzero.Zero(regather=False)}),
        pytest.param("dp=4,tp=2", {"zero": jzero.Zero(regather=False), "sizes": {"remat": "full"}}, marks=slow),
        pytest.param("node=2,dp=2,tp=2", {"zero": jzero.Zero(axes=("dp",))}, marks=slow),
        pytest.param("dp=8", {"zero": jzero.Zero(replicate=("*/attention/*",), persist_below=40)}, marks=slow),
        pytest.param("dp=8", {"micro_batches": 4}, marks=slow),
        ("dp=4,tp=2", {"ahead": 2, "sizes": {"remat": "full"}}),
        pytest.param("dp=8", {"ahead": 2, "sizes": {"layers": 3}}, marks=slow),
        pytest.param("dp=8", {"ahead": 2, "stage": 2}, marks=slow),
        pytest.param("dp=8", {"sizes": {"layers": 1}}, marks=slow),
        pytest.param("dp=8", {"ahead": 2, "sizes": {"layers": 2}}, marks=slow),
        pytest.param("dp=8", {"sizes": {"norm": "layer", "biases": "all", "mlp": "gelu"}}, marks=slow),
    ],
    ids=str,
)
def test_options_change_nothing_either(mesh, changes):
    assert_prefetching_changes_nothing(mesh, **({"stage": 3} | changes))


@slow
@pytest.mark.parametrize("remat", REMATS)
def test_bfloat16_agrees_to_its_precision(remat):
    """Both round at the same places, but for sums whose order the compiler chooses."""
    (data,) = batches(1, 8)
    plain, prefetching = (
        one_step(
            decoder(layers_ahead=k, layers=4, remat=remat, dtype="bfloat16"), next_token_loss, "dp=4,tp=2", data,
            stage=3, precision=jzero.Precision(params="bfloat16"),
        )[0]
        for k in (0, 1)
    )  # fmt: skip
    single.assert_gradients_equal(prefetching, plain, 1e-2)


# ---- bytes and memory ------------------------------------------------------------------------------------------------


def compiled(mesh, stage, ahead, remat="none", micro_batches=1, layers=5):
    (data,) = batches(1, 8 * micro_batches)
    run = jzero.setup(
        decoder(layers=layers, layers_ahead=ahead, remat=remat), next_token_loss, optax.adamw(1e-3), mesh, data,
        stage=stage, micro_batches=micro_batches,
    )  # fmt: skip
    return run, run.lower()["step"].compile()


@pytest.mark.parametrize(
    ("mesh", "stage", "remat", "micro_batches"),
    [
        ("dp=8", 3, "none", 4),
        ("dp=4,tp=2", 2, "full", 1),
        *(
            pytest.param(*cell, marks=slow)
            for cell in itertools.product(MESHES, (1, 2, 3), REMATS, (1, 4))
            if cell not in {("dp=8", 3, "none", 4), ("dp=4,tp=2", 2, "full", 1)}
        ),
    ],
)
def test_it_sends_the_bytes_of_the_plain_scan_and_holds_two_layers_more(mesh, stage, remat, micro_batches):
    (run, plain), (_, prefetching) = (compiled(mesh, stage, k, remat, micro_batches) for k in (0, 1))
    by = ("kind", "axes", "dtype")
    sent = hlo.traffic(hlo.collectives(prefetching, run.mesh), by)
    assert sent == hlo.traffic(hlo.collectives(plain, run.mesh), by)
    assert hlo.memory(prefetching).temp_bytes <= hlo.memory(plain).temp_bytes + 2 * layer_bytes(run)


# ---- any model ------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 16, 4


def keys():
    return jax.random.split(jax.random.key(0), DEPTH)


class Layer(nnx.Module):
    """Two streams, statistics, dropout, a frozen matrix and one that nothing reads."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))
        self.fixed = Fixed(nnx.initializers.normal()(rngs.params(), (WIDTH, WIDTH)))
        self.idle = nnx.Param(jnp.ones((WIDTH,)))
        self.seen = nnx.BatchStat(jnp.zeros((WIDTH,)))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, streams, table, gain):
        x, y = streams
        self.seen[...] = 0.9 * self.seen[...] + 0.1 * jax.lax.stop_gradient(x.mean(0))
        h = self.dropout(nnx.gelu(self.up(x + y @ table)))
        return x + self.scale[...] * self.down(h), y + gain * jnp.tanh(x @ self.fixed[...])


class Fixed(nnx.Param):
    pass


class TwoStreams(nnx.Module):
    def __init__(self, ahead, remat):
        self.layers = nnx.vmap(lambda key: Layer(nnx.Rngs(params=key, dropout=key)))(keys())
        # Every layer's: its gradient is the sum of theirs.
        self.table = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
        self.ahead, self.remat = ahead, remat

    def __call__(self, x):
        return jzero.scan_layers(
            lambda layer, *args: layer(*args), self.layers, (x, jnp.zeros_like(x)), self.table.kernel[...], 0.5,
            layers_ahead=self.ahead, remat=self.remat,
        )  # fmt: skip


def two_streams_loss(model, batch):
    x, y = model(batch["x"])
    return jnp.sum((x - batch["y"]) ** 2 + y**2), batch["x"].shape[0]


@pytest.fixture(scope="module")
def points():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(16, WIDTH)).astype(np.float32) for name in "xy"}


ANY_MODEL = [(3, "dots", 1), (3, "full", 2), (2, "none", 1)]


@pytest.mark.parametrize(
    ("stage", "remat", "ahead"), [(3, "none", 1), (2, "full", 2), *(pytest.param(*c, marks=slow) for c in ANY_MODEL)]
)
def test_any_model_may_call_it(stage, remat, ahead, points):
    trained = nnx.All(nnx.Param, nnx.Not(Fixed))
    plain, prefetching = (
        one_step(lambda k=k: TwoStreams(k, remat), two_streams_loss, "dp=8", points, stage=stage, trainable=trained)
        for k in (0, ahead)
    )
    assert_same(prefetching, plain)
    assert ("layers", "fixed") not in prefetching[0].grads
    assert np.linalg.norm(prefetching[0].grads["table", "kernel"]) > 0
    assert not prefetching[0].grads["layers", "idle"].any()
    assert np.abs(prefetching[0].state["layers", "seen"]).min() > 0


class ClosesOver(TwoStreams):
    """The same table and a mask, taken from where the block stands."""

    def __call__(self, x):
        gain, few = jnp.tanh(x @ self.table.kernel[...]), (x > 1).astype(jnp.int32)

        def block(layer, streams):
            return layer(streams, self.table.kernel[...], gain * (1 - few))

        return jzero.scan_layers(block, self.layers, (x, jnp.zeros_like(x)), layers_ahead=self.ahead, remat=self.remat)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=slow), 3])
def test_a_block_may_close_over_arrays(stage, points):
    plain, prefetching = (
        one_step(lambda k=k: ClosesOver(k, "none"), two_streams_loss, "dp=8", points, stage=stage) for k in (0, 1)
    )
    assert_same(prefetching, plain)
    assert np.linalg.norm(prefetching[0].grads["table", "kernel"]) > 0


class RunTwice(TwoStreams):
    """One stack for two passes: what a layer counts and sees goes on from the first to the second."""

    def __call__(self, x):
        for _ in range(2):
            x, _ = super().__call__(x)
        return x, x


def smoothness_loss(model, batch):
    """A gradient in the loss: its own gradient is one of second order."""
    slope = nnx.grad(lambda model, x: jnp.sum(jnp.sin(model(x)[0])), argnums=1)(model, batch["x"])
    return jnp.sum(slope**2) + two_streams_loss(model, batch)[0], batch["x"].shape[0]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=slow), 3])
def test_a_stack_may_run_twice(stage, points):
    plain, prefetching = (
        one_step(lambda k=k: RunTwice(k, "none"), two_streams_loss, "dp=8", points, stage=stage) for k in (0, 1)
    )
    assert_same(prefetching, plain)


@pytest.mark.parametrize(
    ("stage", "remat"), [pytest.param(0, "none", marks=slow), (3, "none"), pytest.param(2, "full", marks=slow)]
)
def test_a_loss_may_have_gradients_in_it(stage, remat, points):
    plain, prefetching = (
        one_step(lambda k=k: TwoStreams(k, remat), smoothness_loss, "dp=8", points, stage=stage) for k in (0, 1)
    )
    assert np.linalg.norm(plain[0].grads["layers", "up", "kernel"]) > 0
    assert_same(prefetching, plain)


def test_outside_of_a_run_it_is_a_function_of_the_module(points):
    model = TwoStreams(1, "none")
    x, y = model(points["x"])
    by_hand = jnp.asarray(points["x"]), jnp.zeros_like(points["x"])
    fresh = TwoStreams(1, "none")
    for i in range(DEPTH):
        graphdef, state = nnx.split(fresh.layers)
        layer = nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], state))
        by_hand = layer(by_hand, fresh.table.kernel[...], 0.5)
    np.testing.assert_allclose(x, by_hand[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, by_hand[1], rtol=1e-5, atol=1e-5)


# ---- what it refuses ------------------------------------------------------------------------------------------------


class Stack(nnx.Module):
    def __init__(self, block, **options):
        self.layers = nnx.vmap(lambda key: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key)))(
            jax.random.split(jax.random.key(0), DEPTH)
        )
        self.block, self.options = block, options

    def __call__(self, x):
        return jzero.scan_layers(self.block, self.layers, x, **self.options)


def set_up(model_fn, points):
    def loss(model, batch):
        return jnp.sum(model(batch["x"]) ** 2), 1.0

    run = jzero.setup(model_fn, loss, optax.sgd(0.1), "dp=8", points, stage=3)
    return run.lower()


def test_a_layer_that_adds_state_to_itself_is_refused(points):
    def block(layer, x):
        layer.seen = nnx.Intermediate(x.mean())
        return layer(x)

    with pytest.raises(ValueError, match=r"'seen'|seen"):
        set_up(lambda: Stack(block), points)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"layers_ahead": -1}, "layers_ahead=-1"), ({"remat": "some"}, "remat 'some' is not one of none, dots, full")],
)
def test_bad_options_are_named(options, message, points):
    with pytest.raises(ValueError, match=message):
        Stack(lambda layer, x: layer(x), **options)(points["x"])


def test_integers_cannot_go_from_layer_to_layer(points):
    model = Stack(lambda layer, x: (layer(x[0]), x[1]))
    with pytest.raises(TypeError, match=r"x\[1\] is int32.*can be broadcast"):
        model((jnp.asarray(points["x"]), jnp.arange(3)))


def test_layers_that_are_not_stacked_are_named(points):
    model = Stack(lambda layer, x: layer(x))
    model.layers.bias = nnx.Param(jnp.zeros((WIDTH,)))
    with pytest.raises(ValueError, match=r"'bias' of shape \(16,\).*stack layers with nnx.vmap|'kernel'.*'bias'"):
        model(points["x"])
