"""In programs that XLA schedules for absent H100s, the traffic of layer loops hides under matrix multiplications."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from tiny_decoder import layer_bytes

import jzero
from jzero import hlo, targets
from jzero.gpus import GPUS
from jzero.mesh import DATA_AXES, TP
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss
from jzero.rates import Rates
from jzero.schedule import schedule

pytestmark = pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))
slow = pytest.mark.slow

SEQ = 256
LARGE = 2**20  # bytes; what is smaller takes no time worth hiding


@functools.cache
def compiled(devices, stage, remat, ahead, mesh=None, seq=SEQ):
    """A run of a decoder whose layers have 6.3 MB of parameters, and its scheduled program."""
    sizes = {"width": 512, "layers": 4, "heads": 4, "kv_heads": 4, "mlp_width": 2048, "vocab": 512}
    config = DecoderConfig(**sizes, dtype="bfloat16", remat=remat, layers_ahead=ahead)
    run = jzero.setup(
        lambda: Decoder(config, rngs=nnx.Rngs(0)),
        next_token_loss,
        optax.adamw(1e-3),
        jzero.make_mesh(mesh or f"dp={devices}", targets.gpu_devices("h100", devices)),
        {"tokens": jax.ShapeDtypeStruct((devices, seq + 1), jnp.int32)},
        stage=stage,
        precision=jzero.Precision(params="bfloat16"),
    )
    return run, run.lower()["step"].compile(compiler_options=targets.COMPILER_OPTIONS)


def in_layer_loops(devices, stage, remat, ahead, mesh=None, seq=SEQ):
    run, program = compiled(devices, stage, remat, ahead, mesh, seq)
    return [c for c in hlo.collectives(program, run.mesh) if c.loops and set(c.axes) <= set(DATA_AXES)]


CELLS = [*itertools.product((8, 64), (2, 3), ("none", "dots", "full"))]
QUICK = (8, 3, "none")


@pytest.mark.parametrize(
    ("devices", "stage", "remat"), [pytest.param(*cell, marks=[] if cell == QUICK else slow) for cell in CELLS]
)
def test_every_gather_and_scatter_of_the_layer_loops_hides_under_a_matmul(devices, stage, remat):
    large = [c for c in in_layer_loops(devices, stage, remat, ahead=1) if c.message_bytes > LARGE]
    # Forward gathers, backward gathers and scatters, each of one layer after the other.
    assert {c.kind for c in large} == ({"reduce-scatter", "all-gather"} if stage == 3 else {"reduce-scatter"})
    assert len({c.loops for c in large if c.kind == "all-gather"}) == (2 if stage == 3 else 0)
    exposed = [(c.name, c.kind, c.message_bytes, c.loops) for c in large if not c.matmuls]
    assert not exposed


@pytest.mark.parametrize(
    ("devices", "stage", "remat"), [pytest.param(*cell, marks=[] if cell == QUICK else slow) for cell in CELLS]
)
def test_it_costs_two_layers_of_memory_at_most(devices, stage, remat):
    run, prefetching = compiled(devices, stage, remat, 1)
    _, plain = compiled(devices, stage, remat, 0)
    assert hlo.memory(prefetching).temp_bytes <= hlo.memory(plain).temp_bytes + 2 * layer_bytes(run)


@pytest.mark.parametrize("mesh", ["dp=4,tp=2", pytest.param("node=2,dp=2,tp=2", marks=slow)])
def test_so_it_is_beside_tensor_parallelism_by_time(mesh):
    """Not by count: the matmuls are short here, and the attention's softmax covers gathers as well."""
    run, program = compiled(8, 3, "none", 1, mesh, seq=2048)
    course = schedule(program, run.mesh, Rates.of(GPUS["h100"], run.mesh))
    large = [c for c in course.collectives if c.layer_turns and TP not in c.axes and c.message_bytes > LARGE]
    assert {c.kind for c in large} == {"reduce-scatter", "all-gather"}
    assert sum(c.exposed_s for c in large) <= 0.01 * sum(c.seconds for c in large)


@slow
def test_a_plain_scan_leaves_gathers_exposed():
    """What the stack is for; should the compiler learn it by itself, the stack can go."""
    gathers = [c for c in in_layer_loops(8, 3, "none", 0) if c.kind == "all-gather" and c.message_bytes > LARGE]
    assert any(not c.matmuls for c in gathers)
