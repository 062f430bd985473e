"""The same claims on programs that XLA's GPU compiler makes, for 8 H100s that are not there.

XLA:CPU widens 16-bit collectives to float32; here bfloat16 stays 16 bits on the wire.
"""

import functools
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.traverse_util import flatten_dict
from tiny_decoder import SEQ, decoder

import jzero
from jzero import hlo, targets
from jzero.mesh import DATA_AXES
from jzero.models.decoder import next_token_loss

pytestmark = pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))

slow = pytest.mark.slow
CUDNN = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None


@functools.cache
def compiled(mesh, stage, micro_batches=1, reduce="float32", remat="none", layers=2):
    run = jzero.setup(
        decoder(dtype="bfloat16", width=64, mlp_width=128, remat=remat, layers=layers),
        next_token_loss,
        optax.adamw(1e-3),
        jzero.make_mesh(mesh, targets.gpu_devices("h100", 8)),
        {"tokens": jax.ShapeDtypeStruct((8 * micro_batches, SEQ + 1), jnp.int32)},
        stage=stage,
        micro_batches=micro_batches,
        precision=jzero.Precision(params="bfloat16", reduce=reduce),
    )
    program = run.lower()["step"].compile(compiler_options=targets.COMPILER_OPTIONS)
    return run, [c for c in hlo.collectives(program, run.mesh) if set(c.axes) <= set(DATA_AXES)]


CELLS = [(stage, m, reduce) for stage in range(4) for m in (1, 4) for reduce in ("float32", "bfloat16")]
QUICK = (3, 4, "float32")


@pytest.mark.parametrize(
    ("stage", "micro_batches", "reduce"), [pytest.param(*c, marks=[] if c == QUICK else slow) for c in CELLS]
)
def test_bfloat16_traffic_is_the_table_byte_for_byte(stage, micro_batches, reduce):
    run, ledger = compiled("dp=8", stage, micro_batches, reduce)
    elements = {path: math.prod(x.shape) for path, x in flatten_dict(run.abstract_state.params).items()}
    kernels = sum(n for path, n in elements.items() if path[0] == "layers" and path[-1] == "kernel")
    psi, M = sum(elements.values()), micro_batches
    reduce_bytes = jnp.dtype(reduce).itemsize

    traffic = hlo.traffic([c for c in ledger if c.message_bytes > 64], by=("kind", "dtype"))
    gathered = {1: psi, 2: psi, 3: M * (psi + kernels)}.get(stage, 0)
    scattered = {1: psi, 2: M * psi, 3: M * psi}.get(stage, 0)
    name = {"float32": "f32", "bfloat16": "bf16"}[reduce]
    expected = {
        ("all-gather", "bf16"): 2 * gathered,
        ("reduce-scatter", name): reduce_bytes * scattered,
        ("all-reduce", name): reduce_bytes * psi if stage == 0 else 0,
    }
    # XLA may combine the all-reduce with the two sums of the metrics.
    scalars = 8 if stage == 0 and reduce == "float32" else 0
    found = {key: size - (scalars if key[0] == "all-reduce" else 0) for key, size in traffic.items()}
    assert found == {key: size for key, size in expected.items() if size}


@pytest.mark.parametrize("stage", [pytest.param(2, marks=slow), 3])
def test_the_layer_loops_hold_the_collectives(stage):
    """XLA:GPU may take turns of a layer loop out of it; the others stay inside, each microbatch anew."""
    run, ledger = compiled("dp=8", stage, 4, layers=4)
    stacked = sum(
        math.prod(x.shape) for path, x in flatten_dict(run.abstract_state.params).items() if path[0] == "layers"
    )
    in_layer_loops = hlo.traffic([c for c in ledger if c.layer_turns], by=("kind",))
    two_of_four_layers = 4 * stacked / 2
    assert in_layer_loops["reduce-scatter",] >= 4 * two_of_four_layers
    assert in_layer_loops.get(("all-gather",), 0) >= (2 * two_of_four_layers if stage == 3 else 0)
    assert not [c for c in ledger if c.message_bytes > 64 and not c.loops and c.kind != "all-gather"]


@slow
@pytest.mark.parametrize("mesh", ["dp=4,tp=2", "node=2,dp=2,tp=2"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_tensor_parallel_meshes_compile_without_an_all_to_all(mesh, remat):
    _, ledger = compiled(mesh, 3, 4, remat=remat)
    assert {c.kind for c in ledger} <= {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.skipif(not CUDNN, reason="needs cuDNN, which the extra aot does not bring: pip install nvidia-cudnn-cu12")
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=slow)])
def test_cudnn_takes_windows_and_packed_rows_inside_the_regions(packed):
    """Per head group of tp, in the region that is manual over data: cuDNN refuses anything left to the compiler."""
    rows = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 129), jnp.int32)} | (
        {"positions": rows, "segments": rows} if packed else {}
    )
    run = jzero.setup(
        decoder(dtype="bfloat16", width=64, kv_heads=2, attention="cudnn", window=32),
        next_token_loss,
        optax.adamw(1e-3),
        jzero.make_mesh("dp=4,tp=2", targets.gpu_devices("h100", 8)),
        batch,
        stage=3,
        precision=jzero.Precision(params="bfloat16"),
    )
    text = run.lower()["step"].compile(compiler_options=targets.COMPILER_OPTIONS).as_text()
    kind = "ScaleBiasSoftmax" if packed else "Softmax"  # a mask is a bias to cuDNN
    assert f"__cudnn$fmha{kind}Backward" in text
    assert re.search(r"sliding_window_length\W+32\b", text)
