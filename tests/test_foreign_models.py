"""Models that know nothing of ZeRO train at every stage as they do on one device.

Each model below is ordinary Flax NNX.  Step-1 gradients leaf by leaf, gradient norms, losses and what the model holds
beside parameters are compared to `one_device`, in float32.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import one_device as single
import optax
import pytest
from flax import linen, nnx
from flax.traverse_util import flatten_dict

import jzero
from jzero import hlo

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
D = 8


def squares(model, batch):
    error = model(batch["x"]) - batch["y"]
    return jnp.sum(error * error), jnp.float32(error.size)


def with_regulariser(model, batch):
    total, weight = squares(model, batch)
    penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return total + weight * 0.1 * penalty, weight


def batches(count: int = 3, rows: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{name: rng.normal(size=(rows, D)).astype(np.float32) for name in "xy"} for _ in range(count)]


class ConvNet(nnx.Module):
    """A Python loop of convolutions with batch norm and dropout."""

    def __init__(self, rngs):
        self.convs = nnx.List([nnx.Conv(n, 4, (3,), rngs=rngs) for n in (1, 4)])
        self.norms = nnx.List([nnx.BatchNorm(4, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        x = x[..., None]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.dropout(jnp.tanh(norm(conv(x))))
        return self.head(x)[..., 0]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(self.norm(x)))


class NoisyBlock(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.batch_norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.batch_norm(super().__call__(x)))


class Scanned(nnx.Module):
    def __init__(self, rngs, block=Block, remat=False):
        self.layers = nnx.vmap(block, in_axes=0, out_axes=0)(rngs.split(3))
        self.remat = remat

    def __call__(self, x):
        def layer(block, x):
            return block(x)

        body = nnx.remat(layer) if self.remat else layer
        return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


class ScannedTwice(nnx.Module):
    """Groups of layers: two layer dims."""

    def __init__(self, rngs):
        self.groups = nnx.vmap(lambda rngs: nnx.vmap(Block)(rngs.split(2)))(rngs.split(3))

    def __call__(self, x):
        layers = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        groups = nnx.scan(layers, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return groups(self.groups, x)


class Ensemble(nnx.Module):
    """Stacked and mapped, not scanned."""

    def __init__(self, rngs):
        self.members = nnx.vmap(Block)(rngs.split(4))

    def __call__(self, x):
        return nnx.vmap(lambda member, x: member(x), in_axes=(0, None))(self.members, x).mean(0)


class Tied(nnx.Module):
    """A module used twice, and two pairs of modules of the same shapes that share a Variable."""

    def __init__(self, rngs):
        self.first = nnx.Linear(D, D, rngs=rngs)
        self.again = self.first
        self.a, self.b, self.head = (nnx.Linear(D, D, rngs=rngs) for _ in range(3))
        self.b.kernel = self.a.kernel
        self.embed = nnx.Embed(D, D, rngs=rngs)
        self.head.kernel = self.embed.embedding

    def __call__(self, x):
        tokens = (jnp.abs(x[:, 0]) * 9).astype(int) % 5
        x = self.again(jnp.tanh(self.first(x)))
        x = self.b(jnp.tanh(self.a(x))) + self.embed(tokens)
        return self.head(x) + self.embed.attend(x)


class Reads(nnx.Module):
    """Every way to get at a parameter's value."""

    def __init__(self, rngs):
        def param(*shape):
            return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape))

        self.matmul, self.transposed, self.array, self.reshaped = (param(D, D) for _ in range(4))
        self.einsum, self.vector, self.rows, self.iterated = param(D, 2, D), param(D), param(2 * D, D), param(2, D, D)
        self.scalar, self.one, self.empty, self.unused = param(), param(1), param(0, D), param(D, D)

    def __call__(self, x):
        x = x @ self.matmul + x @ self.transposed.T
        x = x + jnp.einsum("bi,iko->bo", x, self.einsum)
        x = x * (self.vector * 2 + 1) - self.vector / 3 - (-self.vector)
        x = x + x @ self.rows[2 : 2 + D] + self.rows[0] + x @ jnp.asarray(self.array) + x @ self.reshaped.reshape(D, D)
        for weight in self.iterated:
            x = x + jnp.tanh(x @ weight)
        x = x + 0.1 * len(self.iterated) * self.iterated.shape[0] + jnp.sum(self.empty)
        x = x * (1 + self.scalar) + self.one[0] + self.one
        return x + jnp.concatenate([self.vector, self.one])[:D] + self.vector.astype(float) + self.vector.at[0].set(1.0)


class Recurrent(nnx.Module):
    """Parameters that a loop over time reads at every step."""

    def __init__(self, rngs):
        self.lstm = nnx.RNN(nnx.LSTMCell(D, D, rngs=rngs))
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        times = self.lstm(x[:, None] * jnp.ones((3, 1))).swapaxes(0, 1)
        x, _ = jax.lax.scan(lambda state, x: (jnp.tanh(self.linear(state) + x), None), x, times)

        def step(linear, state, x):
            return jnp.tanh(linear(state) + x), None

        return nnx.scan(step, in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))(self.linear, x, times)[0]


class Branches(nnx.Module):
    """Parameters that only some devices read: the branch depends on the rows."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        x = jax.lax.cond(jnp.sum(x) > 0, self.a, self.b, x)
        x = nnx.cond(jnp.sum(x) > 0, lambda m, x: m.a(x), lambda m, x: m.b(x), self, x)
        return jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(self.a(x)), x)


class Transforms(nnx.Module):
    """Functional transforms round reads, and a gradient inside the loss."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        x = nnx.jit(lambda m, x: m(x))(self.a, x) + jax.jit(self.b)(x)
        x = nnx.remat(lambda m, x: jnp.tanh(m(x)))(self.b, x) + jax.checkpoint(lambda x: jnp.tanh(self.a(x)))(x)
        x = x + jax.grad(lambda x: jnp.sum(jnp.tanh(self.a(x))))(x) + jax.vmap(self.b)(x)
        graphdef, state = nnx.split(self.b)
        x = x + nnx.clone(self.a)(x) + nnx.merge(graphdef, state)(x)
        inner = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(self.a)
        adapted = jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(self.a), inner)
        return nnx.merge(nnx.graphdef(self.a), adapted)(0.1 * x)


class Containers(nnx.Module):
    def __init__(self, rngs):
        self.list = nnx.List([nnx.Linear(D, D, rngs=rngs), nnx.List([nnx.Linear(D, D, rngs=rngs)])])
        self.dict = nnx.Dict({"linear": nnx.Linear(D, D, rngs=rngs), "scale": nnx.Param(jnp.ones(D))})
        self.numbered = nnx.data({0: nnx.Param(jnp.ones(D)), 3: nnx.Linear(D, D, rngs=rngs)})
        self.sequence = nnx.Sequential(nnx.Linear(D, 11, rngs=rngs), jnp.tanh, nnx.Linear(11, D, rngs=rngs))

    def __call__(self, x):
        x = self.dict.linear(self.list[1][0](self.list[0](x))) * self.dict["scale"]
        return self.numbered[3](self.sequence(x)) * self.numbered[0]


class OddSizes(nnx.Module):
    """Nothing divides by the devices."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(503, 7, rngs=rngs)
        sizes = (7, 11, 17, 5)
        self.layers = nnx.List([nnx.Linear(n, m, rngs=rngs) for n, m in itertools.pairwise(sizes)])

    def __call__(self, x):
        x = self.embed((jnp.abs(x[:, 0]) * 100).astype(int) % 503)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return jnp.pad(x, ((0, 0), (0, D - 5)))


class Library(nnx.Module):
    """Layers of Flax with several parameters each."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=D, decode=False, rngs=rngs)
        self.einsum = nnx.Einsum("bi,ij->bj", (D, D), (D,), rngs=rngs)
        self.general = nnx.LinearGeneral(D, (2, 4), rngs=rngs)
        self.group_norm = nnx.GroupNorm(D, num_groups=2, rngs=rngs)
        self.prelu = nnx.PReLU()

    def __call__(self, x):
        x = self.attention(x[:, None] * jnp.arange(1, 4)[:, None])[:, 1]
        return self.prelu(self.group_norm(self.general(self.einsum(x)).reshape(x.shape)))


class LowRank(nnx.Module):
    """A base with adapters, and a parameter of integers."""

    def __init__(self, rngs):
        self.linear = nnx.LoRALinear(D, D, lora_rank=2, rngs=rngs)
        self.lora = nnx.LoRA(D, 4, D, base_module=nnx.Linear(D, D, rngs=rngs), rngs=rngs)
        self.lora.lora_b[...] += 0.1
        self.order = nnx.Param(jnp.arange(D)[::-1])

    def __call__(self, x):
        return self.lora(jnp.tanh(self.linear(x)))[:, self.order[...]]


class PlainArrays(nnx.Module):
    """Arrays that are no Variables, as attributes; numbers as Variables."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((D, D))) / 3
        self.ramp = np.linspace(0, 1, D, dtype=np.float32)
        self.tables = nnx.data([jnp.arange(D) * 0.1])
        self.calls = nnx.Variable(0)
        self.scale = nnx.Param(2.0)

    def __call__(self, x):
        self.calls[...] += 1
        return self.scale * (self.linear(x) @ self.mask) * self.ramp + self.tables[0]


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm()(jnp.tanh(linen.Dense(16)(x)))
        return linen.Dense(D)(x)


def wrapped_linen():
    return nnx.bridge.ToNNX(LinenNet(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, D)))


def made(cls, *args, **kwargs):
    return lambda: cls(nnx.Rngs(0), *args, **kwargs)


MODELS = {
    "convnet": (made(ConvNet), squares),
    "scanned": (made(Scanned), squares),
    "scanned_remat": (made(Scanned, remat=True), squares),
    "scanned_noisy": (made(Scanned, NoisyBlock, remat=True), squares),
    "scanned_twice": (made(ScannedTwice), squares),
    "ensemble": (made(Ensemble), squares),
    "tied": (made(Tied), squares),
    "regularised": (made(Tied), with_regulariser),
    "reads": (made(Reads), squares),
    "recurrent": (made(Recurrent), squares),
    "branches": (made(Branches), squares),
    "transforms": (made(Transforms), squares),
    "containers": (made(Containers), squares),
    "odd_sizes": (made(OddSizes), squares),
    "library": (made(Library), squares),
    "low_rank": (made(LowRank), squares),
    "plain_arrays": (made(PlainArrays), squares),
    "linen": (wrapped_linen, squares),
}
TX = optax.sgd(0.02, momentum=0.9)
# Batch norm takes the bias of a convolution away again, softmax the bias of the keys: their gradients are rounding.
WITH_GRADIENTS_OF_ZERO = ("convnet", "library")


@functools.cache
def reference(name: str, devices: int, micro_batches: int) -> single.Trace:
    model_fn, loss_fn = MODELS[name]
    return single.one_device(model_fn, loss_fn, TX, batches(), devices=devices, micro_batches=micro_batches)


def check(name: str, stage: int, mesh_name: str, micro_batches: int) -> None:
    model_fn, loss_fn = MODELS[name]
    mesh = single.mesh(mesh_name)
    run = jzero.setup(
        model_fn, loss_fn, single.recording(TX), mesh, batches()[0], stage=stage, micro_batches=micro_batches
    )
    got, wanted = single.train(run, batches()), reference(name, mesh.shape["node"] * mesh.shape["dp"], micro_batches)
    single.assert_equal(got, wanted, floor=0.01 if name in WITH_GRADIENTS_OF_ZERO else 0.0)
    assert set(got.state) == set(wanted.state)
    for path, value in wanted.state.items():
        np.testing.assert_allclose(got.state[path], value, rtol=1e-5, atol=1e-6, err_msg=str(path))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_at_stage_3_as_on_one_device(name):
    check(name, 3, "dp4", micro_batches=1)


@pytest.mark.parametrize(
    ("name", "stage", "mesh_name"),
    [
        ("convnet", 1, "node2dp2"),
        ("scanned_noisy", 2, "dp4"),
        ("scanned_twice", 2, "node2dp2"),
        ("tied", 2, "dp4"),
        ("reads", 2, "node2dp2"),
        ("branches", 2, "dp4"),
        ("transforms", 1, "dp4"),
        ("linen", 0, "node2dp2"),
    ],
)
def test_a_model_trains_at_another_stage_as_on_one_device(name, stage, mesh_name):
    check(name, stage, mesh_name, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("mesh_name", "micro_batches"), [("dp4", 1), ("node2dp2", 2), ("dp2tp2", 1), ("dp4", 2)])
def test_every_model_trains_in_every_cell_as_on_one_device(name, stage, mesh_name, micro_batches):
    check(name, stage, mesh_name, micro_batches)


def test_a_tied_leaf_is_one_leaf():
    run = jzero.setup(made(Tied), squares, TX, single.mesh(), batches()[0], stage=3)
    paths = set(flatten_dict(run.specs.params))
    assert ("a", "kernel") in paths
    assert ("b", "kernel") not in paths
    assert ("embed", "embedding") in paths
    assert ("head", "kernel") not in paths
    assert ("again", "kernel") in paths
    assert ("first", "kernel") not in paths
    model = run.model(run.init())
    assert model.b.kernel is model.a.kernel
    assert model.head.kernel is model.embed.embedding
    assert model.again is model.first


@pytest.mark.parametrize("stage", [2, 3])
def test_an_unused_parameter_has_a_gradient_of_zero_and_stays(stage):
    run = jzero.setup(made(Reads), squares, single.recording(TX), single.mesh(), batches()[0], stage=stage)
    before = single.arrays(run.init().params)
    got = single.train(run, batches())
    assert not got.grads["unused",].any()
    np.testing.assert_array_equal(got.params["unused",], before["unused",])
    assert got.grads["empty",].shape == (0, D)


def test_what_cannot_be_divided_is_reported_with_its_reason():
    run = jzero.setup(made(OddSizes), squares, TX, single.mesh(), batches()[0], stage=3)
    whole = {leaf.path: leaf for leaf in run.whole}
    assert set(whole) == {"/".join(map(str, path)) for path in flatten_dict(run.specs.params)}
    assert whole["embed/embedding"].nbytes == 503 * 7 * 4
    assert "no dim of (503, 7) is a multiple of dp=4" in whole["embed/embedding"].reason


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_leaves_stay_bit_equal_without_gradient_or_optimizer_state(stage):
    tx = single.recording(optax.adamw(0.1, weight_decay=0.1))
    run = jzero.setup(made(LowRank), squares, tx, single.mesh(), batches()[0], stage=stage, trainable=nnx.LoRAParam)
    state = run.init()
    before, lora = single.arrays(state.frozen), single.arrays(state.params)
    trained = {("linear", "lora", "lora_a"), ("linear", "lora", "lora_b"), ("lora", "lora_a"), ("lora", "lora_b")}
    assert set(lora) == trained
    assert ("order",) in before
    assert before["order",].dtype == np.int32
    for tree in (run.specs.grads, state.opt_state.grads, state.opt_state.inner[0].mu):
        assert set(flatten_dict(tree)) == trained
    for batch in batches():
        state, _ = run.step(state, batch)
    after = single.arrays(state.frozen)
    assert set(after) == set(before)
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=str(path))
    assert all((single.arrays(state.params)[path] != lora[path]).any() for path in trained)


def test_frozen_parts_train_as_on_one_device():
    wanted = single.one_device(made(LowRank), squares, TX, batches(), trainable=nnx.LoRAParam)
    run = jzero.setup(
        made(LowRank), squares, single.recording(TX), single.mesh(), batches()[0], stage=3, trainable=nnx.LoRAParam
    )
    single.assert_equal(single.train(run, batches()), wanted)


def test_a_parameter_of_integers_is_never_differentiated():
    run = jzero.setup(made(LowRank), squares, TX, single.mesh(), batches()[0], stage=3, trainable=nnx.Param)
    assert ("order",) not in flatten_dict(run.specs.params)
    state, _ = run.step(run.init(), batches()[0])
    np.testing.assert_array_equal(single.arrays(state.frozen)["order",], np.arange(D)[::-1])


class StackedAlongDim1(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs), out_axes=1)(rngs.split(D))

    def __call__(self, x):
        layer = nnx.remat(lambda linear, x: jnp.tanh(linear(x)))
        return nnx.scan(layer, in_axes=(1, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layers_stacked_along_another_dim_come_into_use_all_at_once(stage):
    wanted = single.one_device(made(StackedAlongDim1), squares, TX, batches(2))
    run = jzero.setup(made(StackedAlongDim1), squares, single.recording(TX), single.mesh(), batches()[0], stage=stage)
    single.assert_equal(single.train(run, batches(2)), wanted)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_regulariser_over_stacked_layers_works_where_nothing_has_to_be_gathered(stage):
    wanted = single.one_device(made(Scanned), with_regulariser, TX, batches(2))
    run = jzero.setup(made(Scanned), with_regulariser, single.recording(TX), single.mesh(), batches()[0], stage=stage)
    single.assert_equal(single.train(run, batches(2)), wanted)


def test_a_layer_loop_without_remat_is_noted_and_a_loop_over_time_is_not():
    noted = jzero.setup(made(Scanned), squares, TX, single.mesh(), batches()[0], stage=3).notes
    assert len(noted) == 1
    assert "test_foreign_models.py" in noted[0]
    assert "remat" in noted[0]
    for model_fn in (made(Scanned, remat=True), made(Recurrent)):
        assert jzero.setup(model_fn, squares, TX, single.mesh(), batches()[0], stage=3).notes == ()


class OneBranch(nnx.Module):
    """Read in one branch alone, which some devices take and others do not."""

    def __init__(self, rngs, when="always"):
        self.a, self.b = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.when = when

    def __call__(self, x):
        x = self.a(x)
        if self.when == "evaluating" and not self.dropout.deterministic:
            return self.b(x)
        return jax.lax.cond(x[0, 0] > 0, self.b, jnp.tanh, x)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_branch_that_some_devices_take_and_others_do_not(stage):
    wanted = single.one_device(made(OneBranch), squares, TX, batches(2), devices=4)
    run = jzero.setup(made(OneBranch), squares, single.recording(TX), single.mesh(), batches()[0], stage=stage)
    single.assert_equal(single.train(run, batches(2)), wanted)
    assert set(run._gradients.hoisted) == {("b", "kernel"), ("b", "bias")}


def test_a_branch_that_only_evaluation_takes():
    run = jzero.setup(made(OneBranch, "evaluating"), squares, TX, single.mesh(), batches()[0], stage=3)
    assert not run._gradients.hoisted
    state = run.init()
    model = run.model(state)
    model.eval()
    losses = [squares(model, {k: x[i : i + 2] for k, x in batches()[0].items()})[0] for i in range(0, 8, 2)]
    metrics = run.evaluate(state, batches()[0])
    np.testing.assert_allclose(metrics["loss"] * metrics["weight"], np.sum(losses), rtol=1e-5)


class Times(nnx.Module):
    """Layers that each loop over time."""

    def __init__(self, rngs, read_first):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(D, D, use_bias=False, rngs=rngs))(rngs.split(2))
        self.read_first = read_first

    def __call__(self, x):
        def layer(linear, x):
            kernel = linear.kernel[...] if self.read_first else linear.kernel
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ kernel), None), x, length=5)[0]

        return nnx.scan(nnx.remat(layer), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def moved_bytes(run: jzero.Run, kind: str) -> int:
    found = hlo.collectives(run.lower()["step"].compile(), run.mesh)
    return sum(c.message_bytes * c.trips for c in found if c.kind == kind and "dp" in c.axes)


def test_what_a_loop_over_time_reads_is_gathered_and_reduced_once():
    run = jzero.setup(made(Recurrent), squares, TX, single.mesh(), batches()[0], stage=3)
    assert run.whole == ()
    psi = sum(x.size * 4 for x in jax.tree.leaves(run.abstract_state.params))
    assert moved_bytes(run, "all-gather") == moved_bytes(run, "reduce-scatter") == psi


@pytest.mark.parametrize(("read_first", "reductions"), [(True, 1), (False, 5)])
def test_a_layer_that_reads_in_a_loop_of_its_own_is_noted(read_first, reductions):
    run = jzero.setup(made(Times, read_first), squares, TX, single.mesh(), batches()[0], stage=3)
    assert moved_bytes(run, "reduce-scatter") == reductions * 2 * D * D * 4
    assert len(run.notes) == (not read_first)
    assert all("test_foreign_models.py" in note and "read them before it" in note for note in run.notes)
    wanted = single.one_device(made(Times, read_first), squares, TX, batches(2))
    run = jzero.setup(made(Times, read_first), squares, single.recording(TX), single.mesh(), batches()[0], stage=3)
    single.assert_equal(single.train(run, batches(2)), wanted)


def test_the_trained_model_is_an_ordinary_module_again():
    run = jzero.setup(made(Tied), squares, TX, single.mesh(), batches()[0], stage=3)
    state, _ = run.step(run.init(), batches()[0])
    model = run.model(state)
    assert type(model.a.kernel) is nnx.Param
    total, weight = squares(model, batches()[1])
    np.testing.assert_allclose(total / weight, run.evaluate(state, batches()[1])["loss"], rtol=1e-5)
