"""FLOPs that are read off a program equal those counted by hand, and bytes are what its kernels must touch."""

import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from tiny_decoder import SEQ, decoder

import jzero
from jzero import targets
from jzero.hlo_cost import Cost, cost
from jzero.hlo_shapes import HloError
from jzero.models.decoder import next_token_loss
from jzero.models.decoder_config import DecoderConfig
from jzero.models.flops import flops_per_token, matmul_parameters

needs_8 = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")
needs_gpu_compiler = pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))
CUDNN = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
ROWS = 8


# ---- the decoder, against counts by hand -----------------------------------------------------------------------------


@functools.cache
def step(mesh: str, micro_batches: int, remat: str, target: str = "cpu", seq: int = SEQ, **sizes):
    devices = targets.gpu_devices("h100", 8) if target == "gpu" else None
    model_fn = decoder(remat=remat, layers=4, layers_ahead=1, **sizes)
    run = jzero.setup(
        model_fn,
        next_token_loss,
        optax.adamw(1e-3),
        jzero.make_mesh(mesh, devices) if target == "gpu" else mesh,
        {"tokens": jax.ShapeDtypeStruct((ROWS * micro_batches, seq + 1), jnp.int32)},
        stage=3,
        micro_batches=micro_batches,
    )
    options = targets.COMPILER_OPTIONS if target == "gpu" else None
    return cost(run.lower()["step"].compile(compiler_options=options))


def config(**sizes) -> DecoderConfig:
    return DecoderConfig(**{"width": 32, "layers": 4, "heads": 4, "kv_heads": 4, "mlp_width": 64, "vocab": 96, **sizes})


def recomputed_per_token(c: DecoderConfig, seq: int) -> int:
    """Full rematerialisation runs a layer's forward pass again, all but its last product, which nothing reads."""
    kernels = matmul_parameters(c) - c.vocab * c.width - c.layers * c.width * c.mlp_width
    return 2 * kernels + 4 * c.layers * c.width * seq


@needs_8
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("mesh", "remat"), [("dp=8", "none"), ("dp=8", "full"), ("dp=4,tp=2", "none")])
def test_flops_of_a_step_are_the_count_by_hand(mesh, remat, micro_batches):
    by_hand = flops_per_token(config(), SEQ) + (recomputed_per_token(config(), SEQ) if remat == "full" else 0)
    assert step(mesh, micro_batches, remat).flops == by_hand * ROWS * micro_batches * SEQ / 8


GPU_SIZES = {"dtype": "bfloat16", "width": 64, "mlp_width": 128}


@needs_gpu_compiler
@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_flops_of_a_program_for_gpus_are_the_same_count(remat):
    c = config(width=64, mlp_width=128)
    by_hand = flops_per_token(c, SEQ) + (recomputed_per_token(c, SEQ) if remat == "full" else 0)
    assert step("dp=8", 1, remat, "gpu", **GPU_SIZES).flops == by_hand * ROWS * SEQ / 8


@needs_gpu_compiler
@pytest.mark.skipif(not CUDNN, reason="needs cuDNN: pip install nvidia-cudnn-cu12")
@pytest.mark.slow
def test_cudnn_computes_the_scores_once_more_on_the_way_back():
    c, seq = config(width=64, mlp_width=128), 128
    once_more = 2 * c.layers * c.width * seq
    by_hand = flops_per_token(c, seq) + once_more
    found = step("dp=8", 1, "none", "gpu", seq, attention="cudnn", **GPU_SIZES)
    assert found.flops == by_hand * ROWS * seq / 8


# ---- functions -------------------------------------------------------------------------------------------------------


def cost_of(f, *shapes) -> Cost:
    return cost(jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile())


def test_element_by_element_reads_and_writes_each_array_once():
    found = cost_of(lambda x, y: jnp.sin(x) + y, (64, 32), (64, 32))
    assert (found.flops, found.read_bytes, found.written_bytes) == (0, 2 * 64 * 32 * 4, 64 * 32 * 4)


def test_a_product_of_wide_operands_is_counted_as_such():
    found = cost_of(jnp.dot, (64, 32), (32, 16))
    assert found.flops == found.wide_flops == 2 * 64 * 32 * 16


def test_a_convolution_sums_over_the_kernel_of_each_feature():
    def f(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID")

    assert cost_of(f, (2, 3, 10, 10), (5, 3, 3, 3)).flops == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


@pytest.mark.parametrize("length", [64, 128])
def test_loops_touch_a_layer_a_turn_and_not_the_stack(length):
    """What is stacked turn by turn, and sliced, is read and written once in all."""

    def f(stack, x):
        def turn(x, layer):
            x = jnp.tanh(x + layer)
            return x, x

        return lax.scan(turn, x, stack)[1]

    stack = length * 256 * 4
    found = cost_of(f, (length, 256), (256,))
    assert stack <= found.written_bytes <= 4 * stack
    assert 2 * stack <= found.read_bytes <= 6 * stack


def test_a_loop_of_unknown_length_cannot_be_counted():
    def f(x):
        return lax.while_loop(lambda x: x.sum() < 10, lambda x: x * 2, x)

    with pytest.raises(HloError, match=r"loop while[.\d]* has no known trip count"):
        cost_of(f, (8,))


# ---- texts: what libraries' calls look like --------------------------------------------------------------------------


def program(lines: str, computations: str = "") -> str:
    return f"HloModule m, is_scheduled=true\n{computations}\nENTRY %main (a: bf16[2]) -> bf16[2] {{\n{lines}\n}}\n"


INPUTS = """  %a = bf16[4,64,32]{2,1,0} parameter(0)
  %b = bf16[4,32,16]{2,1,0} parameter(1)
"""


def test_cublas():
    config = {
        "gemm_backend_config": {
            "dot_dimension_numbers": {"lhs_contracting_dimensions": ["2"], "lhs_batch_dimensions": ["0"]}
        }
    }
    line = (
        '  ROOT %g = (bf16[4,64,16]{2,1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
        f"backend_config={json.dumps(config)}, more={{}}"
    )
    found = cost(program(INPUTS + line))
    assert found.flops == 2 * 4 * 64 * 32 * 16
    assert (found.read_bytes, found.written_bytes) == (4 * 64 * 32 * 2 + 4 * 32 * 16 * 2, 4 * 64 * 16 * 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("__cublas$gemm", "instruction g: no dot_dimension_numbers"),
        ("__cudnn$fmhaSoftmax", "instruction g: no shape of the attention scores"),
        ("__onednn$matmul", r"instruction g: no rule for counting the FLOPs of '__onednn\$matmul'"),
    ],
)
def test_a_library_s_product_that_cannot_be_read_is_an_error_that_names_it(call, message):
    line = f'  ROOT %g = bf16[4,64,16]{{2,1,0}} custom-call(%a, %b), custom_call_target="{call}"'
    with pytest.raises(HloError, match=message):
        cost(program(INPUTS + line))


UPDATED = """
%update (p: f32[100,8], u: f32[8], i: s32[]) -> f32[100,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %u = f32[8]{0} parameter(1)
  %row = f32[1,8]{1,0} bitcast(%u)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %d = f32[100,8]{1,0} dynamic-update-slice(%p, %row, %i, %z)
}
"""
SLICED = """
%sliced (p: f32[100,8], i: s32[]) -> f32[8] {
  %p = f32[100,8]{1,0} parameter(0)
  %wide = f32[100,8]{1,0} convert(%p)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = f32[1,8]{1,0} dynamic-slice(%wide, %i, %z), dynamic_slice_sizes={1,8}
  ROOT %r = f32[8]{0} bitcast(%s)
}
"""


@pytest.mark.parametrize(
    ("computation", "call", "read", "written"),
    [
        (UPDATED, "f32[100,8]{1,0} fusion(%p, %u, %i), kind=kLoop, calls=%update", 8 * 4 + 4, 8 * 4),
        (SLICED, "f32[8]{0} fusion(%p, %i), kind=kLoop, calls=%sliced", 8 * 4 + 4, 8 * 4),
    ],
)
def test_fusions_that_update_or_slice_touch_that_alone(computation, call, read, written):
    inputs = "  %p = f32[100,8] parameter(0)\n  %u = f32[8] parameter(1)\n  %i = s32[] parameter(2)\n"
    found = cost(program(f"{inputs}  ROOT %f = {call}", computation))
    assert found == Cost(read_bytes=read, written_bytes=written, kernels=1)
