"""Parameters at rest in host memory: the same gradients bit for bit, and one layer fetched at a time, never all."""

import dataclasses
import functools
import itertools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec as P
from tiny_decoder import batches, decoder

import jzero
from jzero import targets
from jzero.collectives import Fetch, Gather, Then, over_data
from jzero.host_params import HOST, on_host, resting_on_host
from jzero.mesh import DATA_AXES
from jzero.models.decoder import next_token_loss
from jzero.zero import Leaf, ShardingError, Zero, data_part, layouts

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")
slow = pytest.mark.slow

LAYERS = 4
MLP = nnx.All(nnx.Param, nnx.PathContains("mlp"))


class LoopOfLayers(nnx.Module):
    """Layers in a list, each rematerialised, between a table that is read twice and what nobody stacks."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (96, 16)))
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

    def __call__(self, tokens):
        x = self.table[...][tokens]
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: jnp.tanh(layer(x)), policy=jzero.remat_policy("none"))(layer, x)
        return x @ self.table[...].T


def log_loss(model, batch):
    tokens = batch["tokens"]
    scores = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.sum(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)), tokens.shape[0]


@functools.cache
def made(mesh, stage, micro_batches=1, trainable=nnx.Param, model="decoder", **sizes):
    """A run, its batch, and what its gradients are made of."""
    model_fn, loss_fn = (
        (LoopOfLayers, log_loss) if model == "loop" else (decoder(layers=LAYERS, **sizes), next_token_loss)
    )
    mesh = jzero.make_mesh(mesh, jax.devices()[:1] if mesh == "dp=1" else jax.devices())
    (data,) = batches(1, 8 * micro_batches)
    tx = optax.sgd(1.0)
    run = jzero.setup(model_fn, loss_fn, tx, mesh, data, stage=stage, micro_batches=micro_batches, trainable=trainable)
    return run, data


def program(run, layouts):
    """The gradients of a run with its parameters at rest as `layouts` say, jitted."""
    gradients = dataclasses.replace(run._gradients, layouts=layouts)
    rest = {path: data_part(to.params) for path, to in layouts.items()}
    trained, frozen = ({p: rest[p] for p in part} for part in (gradients.template.trained, gradients.template.frozen))
    summed = {path: data_part(layouts[path].opt_state) for path in gradients.slots}
    return jax.jit(over_data(gradients, run.mesh, (trained, frozen, P(), P(DATA_AXES)), (summed, P(), P())))


def arguments(run, layouts, state, batch, place):
    params, frozen = (
        {path: place(x, layouts[path].at_rest(run.mesh)) for path, x in flatten_dict(part).items()}
        for part in (state.params, state.frozen)
    )
    return params, frozen, flatten_dict(state.model_state), batch


def both(run):
    """Layouts on the device, and with every parameter on the host."""
    on_device = run._gradients.layouts
    return on_device, {path: resting_on_host(to) for path, to in on_device.items()}


def gradients(run, layouts, data):
    def place(x, sharding):
        return jax.device_put(np.asarray(x), sharding)

    args = arguments(run, layouts, run.init(), run.put(data), place)
    with jax.set_mesh(run.mesh):
        grads, sums, _ = program(run, layouts)(*args)
    return {path: np.asarray(x) for path, x in (grads | sums).items()}


def as_struct(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def traced(run, layouts):
    args = arguments(run, layouts, run.abstract_state, run.abstract_batch, as_struct)
    with jax.set_mesh(run.mesh):
        return program(run, layouts).trace(*args)


# ---- equal ----------------------------------------------------------------------------------------------------------

CELLS = [
    (mesh, stage, remat, micro_batches, ahead)
    # One device has nothing to shard: all stages are stage 0 there.
    for (mesh, stage), remat, micro_batches, ahead in itertools.product(
        (("dp=1", 0), *(("dp=4,tp=2", stage) for stage in (0, 1, 2, 3))), ("none", "full"), (1, 4), (0, 1, 2)
    )
]
QUICK = [("dp=4,tp=2", 3, "none", 4, 1), ("dp=4,tp=2", 2, "full", 1, 0), ("dp=1", 0, "full", 4, 2)]


@pytest.mark.parametrize(
    ("mesh", "stage", "remat", "micro_batches", "ahead"),
    [pytest.param(*cell, marks=[] if cell in QUICK else slow) for cell in CELLS],
)
def test_gradients_are_those_of_parameters_on_the_device_bit_for_bit(mesh, stage, remat, micro_batches, ahead):
    assert_same(*made(mesh, stage, micro_batches, remat=remat, layers_ahead=ahead))


@pytest.mark.parametrize(("mesh", "stage"), [("dp=8", 3), pytest.param("dp=1", 0, marks=slow)])
def test_layers_in_a_python_loop_and_a_table_that_is_read_twice_are_equal_too(mesh, stage):
    assert_same(*made(mesh, stage, model="loop"))


@slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters_are_fetched_too(stage):
    assert_same(*made("dp=4,tp=2", stage, trainable=MLP))


def assert_same(run, data):
    on_device, hosted = (gradients(run, layouts, data) for layouts in both(run))
    assert any(np.abs(x).max() > 0 for x in on_device.values())
    for path, x in on_device.items():
        np.testing.assert_array_equal(hosted[path], x, err_msg=str(path))


# ---- one layer at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("stage", "ahead"), [(0, 0), (0, 1), (3, 0), (3, 1)])
def test_every_pass_fetches_a_layer_at_a_time_inside_its_loop(stage, ahead, frozen):
    """Scales of norms come once: without rematerialisation what was made of them is kept."""
    trainable = MLP if frozen else nnx.Param
    run, _ = made("dp=4,tp=2", stage, trainable=trainable, layers_ahead=ahead)
    stacked = {path: x.shape for path, x in of_all(run).items() if path[0] == "layers"}
    kernels = [path for path, shape in stacked.items() if len(shape) == 3]
    fetched = list(fetches(traced(run, both(run)[1]).jaxpr.jaxpr))

    assert all(len(shape) < 3 for shape, _ in fetched)
    in_loops = Counter(loops for _, loops in fetched)
    # Beside the loops stand the layers ahead, those of backward for the last ones of forward, and what is not stacked.
    each_pass = 2 * len(kernels) + (len(stacked) - len(kernels))
    assert in_loops.pop(()) == len(of_all(run)) - len(stacked) + ahead * each_pass
    assert in_loops == {(LAYERS - ahead,): each_pass}


def test_accumulation_fetches_in_every_microbatch_anew():
    run, _ = made("dp=4,tp=2", 3, 4, remat="none", layers_ahead=1)
    assert {loops for _, loops in fetches(traced(run, both(run)[1]).jaxpr.jaxpr)} == {(4,), (4, LAYERS - 1)}


def test_nothing_is_fetched_of_what_rests_on_the_device():
    run, _ = made("dp=4,tp=2", 3, 4, remat="none", layers_ahead=1)
    assert not list(fetches(traced(run, both(run)[0]).jaxpr.jaxpr))


def of_all(run) -> dict[Any, Any]:
    state = run.abstract_state
    return {**flatten_dict(state.params), **flatten_dict(state.frozen)}


def fetches(jaxpr, loops=()):
    """Of everything that goes to device memory its shape, and the lengths of the loops round it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            yield eqn.outvars[0].aval.shape, loops
        inside = (*loops, eqn.params["length"]) if eqn.primitive.name == "scan" else loops
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                sub = getattr(sub, "jaxpr", sub)
                if isinstance(sub, Jaxpr):
                    yield from fetches(sub, inside)


@pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))
def test_a_gpu_copies_layer_by_layer_under_matmuls():
    """Parameters of absent GPUs have no kind of memory, so this program first puts them where a run would hold them."""
    sizes = {"width": 1024, "mlp_width": 3072, "heads": 16, "kv_heads": 16}  # compiled, not run
    rows = {"tokens": jax.ShapeDtypeStruct((8, 1025), jnp.int32)}
    mesh = jzero.make_mesh("dp=8", targets.gpu_devices("h100", 8))
    model_fn = decoder(dtype="bfloat16", layers=LAYERS, layers_ahead=1, **sizes)
    precision = jzero.Precision(params="bfloat16")
    run = jzero.setup(model_fn, next_token_loss, optax.sgd(1.0), mesh, rows, stage=3, precision=precision)
    hosted = both(run)[1]

    def from_host(params, *others):
        return program(run, hosted)(jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), params), *others)

    with jax.set_mesh(run.mesh):
        lowered = jax.jit(from_host).lower(*arguments(run, hosted, run.abstract_state, run.abstract_batch, as_struct))
    options: dict[str, Any] = jzero.Comm().compiler_options(mesh, 2**30, layers_fetch=True) | targets.COMPILER_OPTIONS
    text = lowered.compile(compiler_options=options).as_text()

    copies = [copy for body in loop_bodies(text) for copy in copies_from_host(body)]
    assert len(copies) >= 2 * sum(len(x.shape) == 3 for x in of_all(run).values())  # of forward and of backward
    assert {layers for layers, _ in copies} == {1}
    assert all(matmuls for _, matmuls in copies)


def loop_bodies(text):
    """The lines of each computation that a while loop runs."""
    names = set(re.findall(r"body=%([\w.-]+)", text))
    return [part.splitlines() for part in text.split("\n\n") for name in names if part.startswith(f"%{name} ")]


def copies_from_host(lines):
    """Of each copy of a stack's slice, how many layers it brings, and how many matmuls stand before its end."""
    for start, line in enumerate(lines):
        if found := re.search(
            r"%([\w.-]+) = \(\(\w+\[\d+,[\d,]+\]\S*S\(5\)\}.*?\), \w+\[(\d+),.* fusion-start\(", line
        ):
            end = next(i for i, later in enumerate(lines) if f"fusion-done(%{found[1]})" in later)
            yield int(found[2]), sum("gemm" in between or " dot(" in between for between in lines[start:end])


# ---- which ----------------------------------------------------------------------------------------------------------

TREE = [
    Leaf(("layers", "kernel"), (3, 1024, 512), 1, P(None, None, None), 2),
    Leaf(("layers", "scale"), (3, 1024), 1, P(None, None), 2),
]


def layouts_of_tree(at_least_bytes, zero=Zero()):  # noqa: B008 (frozen)
    found, _ = layouts(TREE, 3, zero, jzero.make_mesh("dp=8"), "float32", "float32")
    return found, on_host(found, TREE, zero, at_least_bytes)


def test_large_leaves_rest_on_the_host_by_the_bytes_of_one_layer():
    before, after = layouts_of_tree(2**20)
    kernel = after["layers", "kernel"]
    assert (kernel.memory, kernel.at_rest(jzero.make_mesh("dp=8")).memory_kind) == (HOST, HOST)
    assert isinstance(kernel.use_forward, Then)
    assert isinstance(kernel.use_forward.first, Fetch)
    assert isinstance(kernel.use_forward.second, Gather)
    assert after["layers", "scale"] == before["layers", "scale"]
    assert dataclasses.replace(kernel, memory=None, use_forward=kernel.use_forward.second) == before["layers", "kernel"]
    assert all(to.memory == HOST for to in layouts_of_tree(0)[1].values())


def test_a_fetch_sends_nothing_over_the_network():
    assert Fetch().moves
    assert Then(Fetch(), Gather(0, ("dp",), P(None, None))).message_bytes(100, 2) == 200


def test_what_would_not_be_offloaded_is_refused():
    with pytest.raises(ShardingError, match="no parameter has 1,048,577 bytes in a layer, the largest has 1,048,576"):
        layouts_of_tree(2**20 + 1)
    with pytest.raises(ShardingError, match=r"zero\.regather false.*all layers at once"):
        layouts_of_tree(0, Zero(regather=False))


def test_a_model_has_its_parameters_on_the_device():
    (data,) = batches(1, 8)
    offload = jzero.Offload(optimizer="host", params="host", min_param_bytes=0)
    run = jzero.setup(decoder(), next_token_loss, optax.sgd(1.0), jzero.make_mesh("dp=8"), data, offload=offload)
    state = run.init()
    loss, weight = next_token_loss(run.model(state), jax.tree.map(jnp.asarray, data))
    np.testing.assert_allclose(float(run.evaluate(state, data)["loss"]), float(loss) / float(weight), rtol=1e-5)
