"""Gradients at rest in host memory: the same training bit for bit, and one layer's at a time on the device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec as P
from test_host_params import LoopOfLayers, log_loss
from tiny_decoder import batches
from tiny_stack import stack
from trained import Trained, assert_same_bits, devices
from trained import train as train_run

import jzero
from jzero.collectives import Fetch, Store, Then
from jzero.host_grads import grads_on_host
from jzero.models.decoder import next_token_loss
from jzero.zero import Leaf, ShardingError, Zero, layouts

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")
slow = pytest.mark.slow

LAYERS, STEPS = 4, 3
GROUP = 9_000  # bytes: less than the state of one kernel on one device, so that pieces are cut
LARGE = 1_000  # bytes of a layer: kernels and tables, but not the scales of norms


@functools.cache
def train(mesh, stage, micro_batches=1, ahead=0, model="stack", precision=None, **offload) -> Trained:
    """A training with weight decay and a clip that bites."""
    run = made(mesh, stage, micro_batches, ahead, model, precision, **offload)
    return train_run(run, batches(STEPS, 8 * micro_batches))


def made(mesh, stage, micro_batches=1, ahead=0, model="stack", precision=None, **offload) -> jzero.Run:
    model_fn, loss_fn = {
        "stack": (stack(LAYERS, layers_ahead=ahead), next_token_loss),
        "loop": (LoopOfLayers, log_loss),
        "unread": (Unread, log_loss),
    }[model]
    (data,) = batches(1, 8 * micro_batches)
    return jzero.setup(
        model_fn,
        loss_fn,
        optax.adamw(1e-2, weight_decay=0.1),
        jzero.make_mesh(mesh, devices(mesh)),
        data,
        stage=stage,
        micro_batches=micro_batches,
        clip_norm=0.5,
        precision=precision or jzero.Precision(),
        offload=jzero.Offload(**{"group_size": GROUP, "min_param_bytes": LARGE} | offload),
    )


# ---- equal ----------------------------------------------------------------------------------------------------------

ONE_DEVICE = ("dp=1", 0)
CELLS = [
    *itertools.product((("dp=4,tp=2", 3), ("dp=8", 2)), (1, 4), (0, 1)),
    *itertools.product((ONE_DEVICE,), (1,), (0, 1)),
]
QUICK = [(("dp=4,tp=2", 3), 4, 1), (("dp=8", 2), 1, 0)]


@pytest.mark.parametrize(
    ("where", "micro_batches", "ahead"), [pytest.param(*c, marks=[] if c in QUICK else slow) for c in CELLS]
)
def test_training_is_that_of_gradients_on_the_device_bit_for_bit(where, micro_batches, ahead):
    hosted = train(*where, micro_batches, ahead, optimizer="device", grads="host")
    assert_same_bits(hosted, train(*where, micro_batches, ahead, optimizer="device"))
    assert max(hosted.norms) > 0.5


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=slow)])
def test_on_one_device_a_table_is_added_up_over_microbatches_in_another_order(ahead):
    """XLA makes `sum + scatter(0, rows)` a scatter into the sum, but where a store or a collective stands between."""
    hosted = train(*ONE_DEVICE, 4, ahead, optimizer="device", grads="host")
    there = train(*ONE_DEVICE, 4, ahead, optimizer="device")
    np.testing.assert_allclose((hosted.losses, hosted.norms), (there.losses, there.norms), rtol=1e-6)
    for path, x in there.params.items():
        np.testing.assert_allclose(hosted.params[path], x, rtol=1e-5, atol=1e-6, err_msg=str(path))


@pytest.mark.parametrize(("mesh", "stage"), [("dp=1", 0), pytest.param("dp=8", 3, marks=slow)])
def test_layers_in_a_python_loop_and_a_table_that_is_read_twice_are_equal_too(mesh, stage):
    offload = {"optimizer": "device", "min_param_bytes": 0 if mesh == "dp=1" else LARGE}
    hosted = train(mesh, stage, model="loop", grads="host", **offload)
    assert_same_bits(hosted, train(mesh, stage, model="loop", **offload))


class Unread(LoopOfLayers):
    """With a parameter that no pass reads."""

    def __init__(self):
        super().__init__()
        self.unread = nnx.Param(jnp.ones((16, 16)))


def test_a_parameter_that_nothing_reads_has_a_gradient_of_zeros_there_too():
    hosted, there = (
        train("dp=1", 0, micro_batches=2, model="unread", optimizer="device", min_param_bytes=0, grads=grads)
        for grads in ("host", "none")
    )
    np.testing.assert_allclose((hosted.losses, hosted.norms), (there.losses, there.norms), rtol=1e-6)


@pytest.mark.parametrize(
    "offload",
    [
        {"optimizer": "host", "params": "host"},
        pytest.param({}, marks=slow),
        pytest.param({"params": "host"}, marks=slow),
        pytest.param({"optimizer": "host"}, marks=slow),
    ],
    ids=str,
)
def test_whatever_else_rests_on_the_host(offload):
    reference = train("dp=4,tp=2", 3, 4, 1, optimizer="device")
    assert_same_bits(train("dp=4,tp=2", 3, 4, 1, grads="host", **offload), reference)


@slow
@pytest.mark.parametrize("grads", ["float32", "bfloat16"])
def test_the_update_on_the_cpu_takes_the_same_gradients(grads):
    precision = jzero.Precision(grads=grads)
    on_cpu = {"optimizer": "host", "update": "cpu"}
    hosted = train("dp=4,tp=2", 3, 4, 1, precision=precision, grads="host", **on_cpu)
    assert_same_bits(hosted, train("dp=4,tp=2", 3, 4, 1, precision=precision, **on_cpu))


def test_gradients_accumulated_in_16_bits_are_equal_too():
    precision = jzero.Precision(grads="bfloat16")
    hosted = train("dp=8", 2, 4, 1, precision=precision, optimizer="device", grads="host")
    assert_same_bits(hosted, train("dp=8", 2, 4, 1, precision=precision, optimizer="device"))


def test_training_follows_the_update_at_once():
    at_once, hosted = train("dp=4,tp=2", 3, 4, 1), train("dp=4,tp=2", 3, 4, 1, optimizer="device", grads="host")
    np.testing.assert_allclose(hosted.losses, at_once.losses, rtol=1e-5)
    np.testing.assert_allclose(hosted.norms[0], at_once.norms[0], rtol=1e-5)


# ---- one layer at a time --------------------------------------------------------------------------------------------

FORMS = [(micro_batches, ahead) for micro_batches in (1, 4) for ahead in (0, 1)]


@pytest.mark.parametrize(("micro_batches", "ahead"), FORMS)
def test_gradients_rest_in_pinned_host_memory_that_one_step_hands_to_the_next(micro_batches, ahead):
    run = made("dp=4,tp=2", 3, micro_batches, ahead, grads="host")
    program, (_, _, memory) = run._driver.programs["gradients"]
    large = [path for path, size in layer_sizes(run).items() if size >= LARGE]
    assert [set(part) for part in memory] == [set(large)] * (2 if micro_batches > 1 else 1)
    assert {x.sharding.memory_kind for part in memory for x in part.values()} == {"pinned_host"}
    with jax.set_mesh(run.mesh):
        _, found, _, free = program.trace(*run._driver.programs["gradients"][1]).out_info
    kinds = dict(zip(run._gradients.trained_layouts, (x.sharding.memory_kind for x in found.grads), strict=True))
    assert {path for path, kind in kinds.items() if kind == "pinned_host"} == set(large)
    assert len(free) == len(memory) - 1


@pytest.mark.parametrize(("micro_batches", "ahead"), FORMS)
def test_no_stack_of_gradients_is_on_the_device(micro_batches, ahead):
    run = made("dp=4,tp=2", 3, micro_batches, ahead, params="host", grads="host")
    assert not stacks_on_device(run)
    assert stacks_on_device(made("dp=4,tp=2", 3, micro_batches, ahead, params="host", optimizer="device"))


@pytest.mark.parametrize(("micro_batches", "ahead"), FORMS)
def test_stores_are_in_the_backward_loop_a_layer_at_a_time(micro_batches, ahead):
    run = made("dp=4,tp=2", 3, micro_batches, ahead, grads="host")
    kernels = [x for x in jax.tree.leaves(run.abstract_state.params) if x.ndim == 3]
    found = [loops for shape, loops in moved(gradients_of(run), jax.memory.Space.Host) if len(shape) == 2]
    outer = (micro_batches,) if micro_batches > 1 else ()
    assert found.count((*outer, LAYERS - ahead)) == len(kernels)
    # Beside the loop stand the layers ahead, and what is not stacked: the table, which is added up there too.
    assert found.count(outer) == ahead * len(kernels) + len(run._driver.programs["gradients"][1][2])


def layer_sizes(run):
    params = flatten_dict(run.abstract_state.params)
    return {path: x.size * 4 // (LAYERS if path[0] == "layers" else 1) for path, x in params.items()}


def gradients_of(run):
    program, arguments = run._driver.programs["gradients"]
    with jax.set_mesh(run.mesh):
        return program.trace(*arguments).jaxpr.jaxpr


def equations(jaxpr, loops=()):
    for eqn in jaxpr.eqns:
        yield eqn, loops
        inside = (*loops, eqn.params["length"]) if eqn.primitive.name == "scan" else loops
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                sub = getattr(sub, "jaxpr", sub)
                if isinstance(sub, Jaxpr):
                    yield from equations(sub, inside)


def moved(jaxpr, space):
    """Of everything that goes to a memory its shape, and the lengths of the loops round it."""
    for eqn, loops in equations(jaxpr):
        if eqn.primitive.name == "device_put" and eqn.outvars[0].aval.memory_space == space:
            yield eqn.outvars[0].aval.shape, loops


def stacks_on_device(run):
    """Arrays in device memory with the shape of a kernel's gradient of all layers, that the program makes as written.

    The shape is that on one device, or, where tp is the compiler's, with tp dims whole.
    """
    kernels = [path for path, x in flatten_dict(run.abstract_state.params).items() if x.ndim == 3]
    state = flatten_dict(run.abstract_state.params)
    shapes = {run._gradients.slots[path].shape for path in kernels}
    shapes |= {state[path].sharding.shard_shape(state[path].shape) for path in kernels}
    made_here = [x.aval for eqn, _ in equations(gradients_of(run)) for x in eqn.outvars]
    return [x for x in made_here if x.shape in shapes and x.memory_space == jax.memory.Space.Device]


# ---- which ----------------------------------------------------------------------------------------------------------

TREE = [
    Leaf(("layers", "kernel"), (3, 1024, 512), 1, P(None, None, None), 2),
    Leaf(("layers", "odd"), (3, 1023, 513), 1, P(None, None, None), 2),
    Leaf(("layers", "scale"), (3, 1024), 1, P(None, None), 2),
]


def layouts_of_tree(stage, at_least_bytes, zero=Zero(), mesh="dp=8", leaves=TREE[::2]):  # noqa: B008 (frozen)
    found, _ = layouts(leaves, stage, zero, jzero.make_mesh(mesh), "float32", "float32")
    return found, grads_on_host(found, leaves, at_least_bytes)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_large_leaves_are_stored_after_their_reduction(stage):
    before, after = layouts_of_tree(stage, 2**20)
    kernel = after["layers", "kernel"]
    assert isinstance(kernel.use_backward, Then)
    assert (kernel.use_backward.first, kernel.use_backward.second) == (before["layers", "kernel"].use_backward, Store())
    assert (kernel.grads_memory, kernel.memory) == ("pinned_host", None)
    assert after["layers", "scale"] == before["layers", "scale"]


@pytest.mark.parametrize(
    ("stage", "zero", "mesh"), [(0, Zero(), "dp=8"), (1, Zero(), "dp=8"), (3, Zero(axes=("dp",)), "node=2,dp=4")]
)
def test_sums_that_are_formed_after_accumulation_are_refused(stage, zero, mesh):
    with pytest.raises(ShardingError, match=r"gradient of 'layers/kernel'.*take stage 2 or 3 with zero\.axes over all"):
        layouts_of_tree(stage, 2**20, zero, mesh)


def test_a_large_leaf_that_stays_whole_is_refused_by_name():
    with pytest.raises(ShardingError, match=r"'layers/odd' \(1,049,598 bytes in a layer.*offload\.min_param_bytes"):
        layouts_of_tree(3, 2**20, leaves=TREE)


def test_what_would_not_be_offloaded_is_refused():
    with pytest.raises(ShardingError, match="no parameter has 1,048,577 bytes in a layer, the largest has"):
        layouts_of_tree(3, 2**20 + 1)


def test_a_store_sends_nothing_over_the_network():
    assert Store().moves
    assert Store().message_bytes(100, 2) == Fetch().message_bytes(100, 2) == 0
