"""Presets are the published models: to the last parameter, counted in the model itself and by hand."""

import math

import jax
import pytest
from flax import nnx

from jzero.models.decoder import Decoder
from jzero.models.decoder_config import DecoderConfig
from jzero.models.flops import flops_per_token, largest_module, matmul_parameters, parameter_count
from jzero.models.presets import PRESETS, RUN_FIELDS, preset_fields

# Elements of the published weights (buffers left out; a tied head counts once); tiny is the default run's.
PUBLISHED = {
    "tiny": 492_160,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "smollm-135m": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}


def test_every_preset_is_held_to_a_published_number() -> None:
    assert PRESETS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    model = nnx.eval_shape(lambda: Decoder(PRESETS[name], rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == PUBLISHED[name]
    assert parameter_count(PRESETS[name]) == PUBLISHED[name]


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("biases", ["none", "qkv", "all"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_formula_counts_every_variant(norm: str, biases: str, mlp: str) -> None:
    config = DecoderConfig(16, 3, 4, 2, 24, 61, head_dim=6, norm=norm, biases=biases, mlp=mlp, qk_norm=True)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameter_count(
        config
    )


@pytest.mark.parametrize("sizes", [{}, {"vocab": 7}, {"vocab": 7, "learned_positions": 90}, {"vocab": 7, "heads": 8}])
@pytest.mark.parametrize("biases", ["none", "qkv", "all"])
def test_the_largest_module_is_the_models(biases: str, sizes: dict) -> None:
    config = DecoderConfig(**{"width": 16, "layers": 1, "heads": 4, "kv_heads": 2, "mlp_width": 24, "vocab": 61,
                              "head_dim": 6, "biases": biases, **sizes})  # fmt: skip
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    held = {}
    for (*path, _), leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        stacked = 1 if "layers" in path else 0
        held[tuple(path)] = held.get(tuple(path), 0) + math.prod(leaf.shape[stacked:])
    assert largest_module(config) == max(held.values())


def test_flops_are_six_per_matmul_parameter_and_attention_by_palms_convention() -> None:
    config = PRESETS["llama-2-7b"]
    lookup = config.vocab * config.width
    norms = (2 * config.layers + 1) * config.width
    assert matmul_parameters(config) == parameter_count(config) - lookup - norms
    assert flops_per_token(config, 4096) == 6 * 6_607_077_376 + 12 * 32 * 32 * 128 * 4096


def test_a_tied_head_counts_as_the_matmul_it_is_and_learned_positions_do_not() -> None:
    # Twelve kernels' worth of D x D in each layer, and the head.
    assert matmul_parameters(PRESETS["gpt2"]) == 12 * 12 * 768 * 768 + 50_257 * 768


def test_flops_equal_those_of_the_compiled_matmuls() -> None:
    config = DecoderConfig(64, 1, 4, 2, 96, 256, head_dim=24)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((1, 128), "int32")
    forward = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens)).lower(state, tokens).compile()
    costs = forward.cost_analysis()
    assert costs is not None
    # The rest, norms and softmax, is small at these sizes.
    assert costs["flops"] / 128 == pytest.approx(flops_per_token(config, 128) / 3, rel=0.1)


def test_a_window_counts_as_its_own_length() -> None:
    config = PRESETS["mistral-7b"]
    assert flops_per_token(config, 32_768) == flops_per_token(config, 4096) > flops_per_token(config, 2048)


def test_a_preset_says_what_a_model_is_and_not_how_it_is_run() -> None:
    assert preset_fields("llama-3.1-8b")["rope_factor"] == 8.0
    assert not preset_fields("gpt2").keys() & RUN_FIELDS
    assert DecoderConfig(**preset_fields("qwen3-8b")) == PRESETS["qwen3-8b"]
