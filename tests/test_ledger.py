"""What a step sends and holds, read off the compiled program and compared with the table of the stages, byte for byte.

Psi is a message size: the sum over leaves of elements / tp x itemsize.  With M microbatches

    stage   over the data-parallel axes, once a step or once a microbatch
    0       all-reduce Psi
    1       reduce-scatter Psi, all-gather Psi
    2       M x reduce-scatter Psi inside the backward layer loop, all-gather Psi
    3       M x (all-gather Psi + all-gather of what the backward pass needs + reduce-scatter Psi), in the layer loops

Leaves that stay whole are all-reduced once a step.  What is left are scalars: loss and weight, and one sum of squares
per leaf for the gradient norm.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from flax.traverse_util import flatten_dict
from tiny_decoder import SEQ, decoder

import jzero
from jzero import hlo
from jzero.mesh import DATA_AXES, TP
from jzero.models.decoder import next_token_loss
from jzero.saved import saved

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")

SCALARS_BYTES = 64  # a norm scale of the test model has 128, all scalars of a step together fewer


kept = {}  # what each run's forward pass keeps


@functools.cache
def compiled(mesh, stage, micro_batches, remat="none", regather=True, axes=DATA_AXES, layers=4, **sizes):
    batch = {"tokens": jax.ShapeDtypeStruct((8 * micro_batches, SEQ + 1), jnp.int32)}
    run = jzero.setup(
        decoder(remat=remat, layers=layers, **sizes),
        next_token_loss,
        optax.adamw(1e-3),
        mesh,
        batch,
        stage=stage,
        micro_batches=micro_batches,
        zero=jzero.Zero(regather=regather, axes=axes),
    )
    program = run.lower()["step"].compile()
    kept[id(run)] = saved(program)
    return run, hlo.collectives(program, run.mesh), hlo.memory(program)


class Psi:
    """Message bytes in float32 of a run's leaves, by what the table says of them."""

    def __init__(self, run):
        whole = {leaf.path for leaf in run.whole}
        sharded_over_tp = flatten_dict(run.specs.params)
        self.whole = self.sharded = self.stacked = self.kernels = self.leaves = 0
        for path, x in flatten_dict(run.abstract_state.params).items():
            tp = run.mesh.shape[TP] if TP in tuple(sharded_over_tp[path]) else 1
            size = math.prod(x.shape) * 4 // tp
            if "/".join(path) in whole:
                self.whole += size
                continue
            self.leaves += 1
            self.sharded += size
            self.stacked += size * (path[0] == "layers")
            self.kernels += size * (path[0] == "layers" and path[-1] == "kernel")


def shards_bytes(run):
    """What one device holds of the train state."""
    state = jax.tree.leaves(run.abstract_state)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)


def sent(ledger, kind, loops=None):
    """Bytes over data-parallel axes, scalars left out; with `loops`, of collectives in that many loops or more."""
    return sum(
        c.total_bytes for c in ledger
        if c.kind == kind and set(c.axes) <= set(DATA_AXES) and c.message_bytes > SCALARS_BYTES
        and (loops is None or len(c.loops) >= loops)
    )  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("mesh", ["dp=8", "dp=4,tp=2", "node=2,dp=2,tp=2"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_is_the_table_of_the_stages_byte_for_byte(stage, mesh, micro_batches):
    run, ledger, _ = compiled(mesh, stage, micro_batches)
    psi = Psi(run)
    M, microbatch_loop = micro_batches, int(micro_batches > 1)

    gathered = {1: psi.sharded, 2: psi.sharded, 3: M * (psi.sharded + psi.kernels)}.get(stage, 0)
    scattered = {1: psi.sharded, 2: M * psi.sharded, 3: M * psi.sharded}.get(stage, 0)
    scalars = 8 + 4 * psi.leaves if stage else 8
    assert sent(ledger, "all-gather") == gathered
    assert sent(ledger, "reduce-scatter") == scattered
    # Whatever of the all-reduces is a tensor, and XLA may combine it with scalars.
    reduced = sum(c.total_bytes for c in ledger if c.kind == "all-reduce" and set(c.axes) & set(DATA_AXES))
    whole = psi.whole if stage else psi.sharded
    assert whole <= reduced <= whole + scalars
    assert not [c for c in ledger if c.kind in ("all-to-all", "collective-permute")]
    if stage >= 2:
        assert sent(ledger, "reduce-scatter", loops=1 + microbatch_loop) == M * psi.stacked
    if stage == 3:
        assert sent(ledger, "all-gather", loops=1 + microbatch_loop) == M * (psi.stacked + psi.kernels)
        assert sent(ledger, "all-gather", loops=microbatch_loop) == gathered
    if stage in (1, 2):
        assert sent(ledger, "all-gather", loops=1) == 0


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("mesh", ["dp=8", "node=2,dp=2,tp=2"])
def test_each_phase_sends_its_share_in_layer_loops_and_beside_them(mesh, micro_batches):
    run, ledger, _ = compiled(mesh, 3, micro_batches)
    psi, M = Psi(run), micro_batches
    beside = psi.sharded - psi.stacked
    large = [c for c in ledger if set(c.axes) <= set(DATA_AXES) and c.message_bytes > SCALARS_BYTES]
    sums = hlo.traffic(large, by=("kind", "phase", "layer_turns"))
    assert {key: size for key, size in sums.items() if key[0] != "all-reduce"} == {
        ("all-gather", "forward", 0): M * beside,
        ("all-gather", "forward", 4): M * psi.stacked,
        ("all-gather", "backward", 4): M * psi.kernels,
        ("reduce-scatter", "backward", 0): M * beside,
        ("reduce-scatter", "backward", 4): M * psi.stacked,
    }


@pytest.mark.parametrize("mesh", ["dp=8", "dp=4,tp=2"])
def test_full_rematerialisation_gathers_every_stacked_leaf_again(mesh):
    run, ledger, _ = compiled(mesh, 3, 4, remat="full")
    assert sent(ledger, "all-gather") == 4 * (Psi(run).sharded + Psi(run).stacked)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_parameters_that_are_kept_gathered_are_gathered_once_a_microbatch(remat):
    run, ledger, _ = compiled("dp=8", 3, 4, remat=remat, regather=False)
    assert sent(ledger, "all-gather") == 4 * Psi(run).sharded
    assert sent(ledger, "reduce-scatter") == 4 * Psi(run).sharded


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_across_nodes_are_reduced_once_a_step(stage):
    """Hybrid sharding: shards over dp; over node what is left of a gradient, 1/dp of it, is all-reduced once."""
    run, ledger, _ = compiled("node=2,dp=2,tp=2", stage, 4, axes=("dp",))
    over_node = [c for c in ledger if c.axes == ("node",)]
    assert {c.kind for c in over_node} == {"all-reduce"}
    assert all(not c.loops for c in over_node)
    assert sum(c.total_bytes for c in over_node) == Psi(run).sharded // run.mesh.shape["dp"]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("mesh", ["dp=4,tp=2", "dp=2,tp=4"])
def test_what_tensor_parallelism_sends_is_the_same_at_every_stage(mesh, micro_batches):
    def over_tp(stage):
        found = [c for c in compiled(mesh, stage, micro_batches)[1] if c.axes == (TP,)]
        return hlo.traffic(
            [c for c in found if c.message_bytes >= SCALARS_BYTES], by=("kind", "dtype", "message_bytes", "trips")
        )

    first = over_tp(0)
    assert first
    assert all(over_tp(stage) == first for stage in (1, 2, 3))


@pytest.mark.parametrize("mesh", ["dp=8", "dp=4,tp=2", "node=2,dp=2,tp=2"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_at_rest_are_the_sum_over_the_specs(stage, mesh):
    """The program's arguments are the state, a shard each, and the batch; nothing else."""
    run, _, memory = compiled(mesh, stage, 4)
    batch_bytes = (SEQ + 1) * 8 * 4 * 4 // (run.mesh.shape["node"] * run.mesh.shape["dp"])
    assert memory.argument_bytes == shards_bytes(run) + batch_bytes
    at_rest = run.at_rest_bytes()
    counters = 3 * 4
    assert sum(at_rest[k] for k in ("params", "frozen", "opt_state", "model_state")) + counters == shards_bytes(run)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("mesh", ["dp=8", "dp=4,tp=2"])
def test_stage_2_holds_a_shard_of_the_gradients(mesh, remat):
    (run, _, stage1), (_, _, stage2) = (compiled(mesh, stage, 4, remat=remat) for stage in (1, 2))
    shards = run.mesh.shape["dp"]
    gradients = Psi(run).sharded + Psi(run).whole
    assert stage1.temp_bytes - stage2.temp_bytes >= 0.8 * (1 - 1 / shards) * gradients


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("mesh", ["dp=8", "dp=4,tp=2"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_stage_3_holds_at_most_two_layers_more_than_stage_2(mesh, remat, micro_batches):
    (run, _, stage2), (_, _, stage3) = (compiled(mesh, stage, micro_batches, remat=remat) for stage in (2, 3))
    psi = Psi(run)
    layers = flatten_dict(run.abstract_state.params)["layers", "mlp", "up", "kernel"].shape[0]
    assert stage3.temp_bytes - stage2.temp_bytes <= 2 * psi.stacked / layers + (psi.sharded - psi.stacked)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("mesh", ["dp=8", "dp=4,tp=2"])
def test_activations_saved_for_backward_are_the_same_at_every_stage(mesh, remat, micro_batches):
    found = [kept[id(compiled(mesh, stage, micro_batches, remat=remat)[0])] for stage in range(4)]
    activations = {s.activation_bytes for s in found}
    assert len(activations) == 1
    layers, rows, width, tp = 4, 8 // (8 if mesh == "dp=8" else 4), 32, 1 if mesh == "dp=8" else 2
    between_layers = layers * rows * SEQ * width * 4
    if remat == "full":  # The input of each layer, and the way from the last one to the loss.
        assert between_layers < activations.pop() < 4 * between_layers
    else:
        assert activations.pop() > 10 * between_layers / tp
    assert [s.gathered_bytes > 0 for s in found] == [False, False, False, True]


@pytest.mark.parametrize(
    "tx",
    [optax.adamw(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=8), optax.contrib.muon(1e-3)],
    ids=["adamw", "adafactor", "muon"],
)
def test_the_state_is_born_in_its_shards(tx):
    """No device ever holds a whole copy of what it keeps a shard of, not even while parameters are made."""
    batch = {"tokens": jax.ShapeDtypeStruct((8, SEQ + 1), jnp.int32)}
    run = jzero.setup(decoder(layers=4), next_token_loss, tx, "dp=8", batch, stage=3)
    with jax.set_mesh(run.mesh):
        memory = hlo.memory(run._driver.init.__wrapped__.lower().compile())
    pointers_bytes = 8 * len(jax.tree.leaves(run.abstract_state))
    assert memory.output_bytes == shards_bytes(run) + pointers_bytes
    assert memory.temp_bytes < 0.5 * Psi(run).sharded
