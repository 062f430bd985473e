"""GPT-2, Llama, Mistral and Qwen are what their papers say, packed or alone, whole or split over tp."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_decoder as reference
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero import hlo
from jzero.mesh import DP, TP
from jzero.models.attention import causal_attention
from jzero.models.decoder import Decoder, next_token_loss
from jzero.models.decoder_config import DecoderConfig
from jzero.models.presets import PRESETS

LENGTH = 24
# One small model of each kind: the preset's variant, other sizes.  A window and an old context shorter than a row, so
# that they show; waves of the stretched rope on both sides of and between its two limits.
KINDS = {
    "gpt2": ("gpt2", {"learned_positions": 32, "kv_heads": 4}),
    "llama-2": ("llama-2-70b", {}),
    "llama-3.1": ("llama-3.1-8b", {"rope_theta": 500.0, "rope_original_positions": 64}),
    "linear": ("llama-2-7b", {"rope_scaling": "linear", "rope_factor": 4.0}),
    "mistral": ("mistral-7b", {"window": 5}),
    "qwen2.5": ("qwen2.5-0.5b", {}),
    "qwen3": ("qwen3-8b", {"head_dim": 16}),
    "all at once": ("gpt2", {"qk_norm": True, "window": 7, "head_dim": 10, "mlp": "swiglu", "tied": False}),
}


def small(kind: str, **changes: Any) -> DecoderConfig:
    preset, variant = KINDS[kind]
    sizes = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 48, "vocab": 61}
    return dataclasses.replace(PRESETS[preset], **(sizes | variant | changes))


def uneven(config: DecoderConfig, factor: float = 1.0) -> Decoder:
    """A decoder with every parameter away from its initial value: biases nonzero, scales apart.

    Weights that are `factor` times as large bring small faults to light, and rounding with them.
    """
    graph, params, rest = nnx.split(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    keys = iter(jax.random.split(jax.random.key(7), 100))
    params = jax.tree.map(lambda x: factor * x + 0.1 * jax.random.normal(next(keys), x.shape, x.dtype), params)
    return nnx.merge(graph, params, rest)


def by_name(model: Decoder) -> dict[str, np.ndarray]:
    params = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = np.asarray(leaf.get_value(), np.float64)
        layers = range(model.config.layers) if path[0] == "layers" else []
        params |= {"/".join(map(str, ("layers", i, *path[1:]))): value[i] for i in layers} or {"/".join(path): value}
    return params


def tokens_of(rows: int, length: int = LENGTH, seed: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, 61)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_reference(kind: str) -> None:
    config = small(kind)
    model, tokens = uneven(config, 3.0), tokens_of(2)
    want = np.stack([reference.logits(config, by_name(model), np.asarray(row)) for row in tokens])
    assert np.abs(want).max() > 1, "the reference must not be trivially near zero"
    np.testing.assert_allclose(model(tokens), want, rtol=2e-4, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("gpt2", {"norm": "rms"}),
        ("gpt2", {"biases": "qkv"}),
        ("gpt2", {"mlp": "swiglu"}),
        ("gpt2", {"learned_positions": None}),
        ("llama-3.1", {"rope_scaling": "linear", "rope_original_positions": 8192}),
        ("linear", {"rope_factor": 1.0}),
        ("mistral", {"window": 6}),
        ("qwen2.5", {"biases": "none"}),
        ("qwen3", {"qk_norm": False}),
    ],
)
def test_the_reference_would_notice_a_variant_left_out(kind: str, without: dict[str, Any]) -> None:
    """The comparison has teeth: with one thing left out, the same parameters give other logits."""
    config = small(kind)
    other = dataclasses.replace(config, **without)
    own, others = by_name(uneven(config, 3.0)), by_name(uneven(other, 3.0))
    row = np.asarray(tokens_of(1)[0])
    right = reference.logits(config, own, row)
    wrong = reference.logits(other, {name: own.get(name, value) for name, value in others.items()}, row)
    assert np.abs(right - wrong).max() > 1e-2 * np.abs(right).max()


def test_llama3_scaling_leaves_short_waves_and_stretches_long_ones() -> None:
    config = small("llama-3.1")
    ratio = [reference.stretched(config, 500.0 ** (-i / 4)) * 500.0 ** (i / 4) for i in range(4)]
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 8)
    assert any(1 / 8 < r < 1 for r in ratio)


# ---- packed rows ----------------------------------------------------------------------------------------------------

DOCUMENTS = ((5, 9, 10), (17, 7), (24,))


def packed_batch() -> tuple[dict[str, jax.Array], list[jax.Array]]:
    """Rows of several documents, and the documents; a token that would predict another document weighs nothing."""
    documents = [tokens_of(1, n + 1, seed)[0] for seed, n in enumerate(n for row in DOCUMENTS for n in row)]
    rows: dict[str, list[np.ndarray]] = {"tokens": [], "weights": [], "positions": [], "segments": []}
    for row, lengths in enumerate(DOCUMENTS):
        first = sum(map(len, DOCUMENTS[:row]))
        # The last token of a document is predicted, never an input: the row continues with the next one's first.
        own = [np.asarray(d) for d in documents[first : first + len(lengths)]]
        pieces = [np.concatenate([d[:-2], d[-2:-1]]) for d in own]
        rows["tokens"].append(np.concatenate([*pieces, own[-1][-1:]]))
        ends = [np.arange(n) == n - 1 for n in lengths]
        rows["weights"].append(1.0 - np.concatenate([*ends[:-1], np.zeros(lengths[-1])]))
        rows["positions"].append(np.concatenate([np.arange(n) for n in lengths]))
        rows["segments"].append(np.repeat(np.arange(len(lengths)), lengths))
    batch = {name: jnp.asarray(np.stack(value)) for name, value in rows.items()}
    return batch | {name: batch[name].astype(jnp.int32) for name in ("positions", "segments")}, documents


def loss_and_grads(model: Decoder, batch: dict[str, jax.Array]) -> tuple[jax.Array, nnx.State]:
    return nnx.jit(lambda model, batch: nnx.value_and_grad(lambda m: next_token_loss(m, batch)[0])(model))(model, batch)


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "all at once"])
def test_packed_documents_have_the_losses_and_gradients_of_the_same_documents_alone(kind: str) -> None:
    model = uneven(small(kind))
    batch, documents = packed_batch()
    loss, grads = loss_and_grads(model, batch)
    # Alone, the last prediction of a document that is not the last of its row is left out, as it is in the row.
    last = np.cumsum([len(row) for row in DOCUMENTS]) - 1
    alone = []
    for i, document in enumerate(documents):
        weights = jnp.ones((1, len(document) - 1)).at[0, -1].set(float(i in last))
        alone.append(loss_and_grads(model, {"tokens": document[None], "weights": weights}))
    np.testing.assert_allclose(loss, sum(part for part, _ in alone), rtol=1e-6)
    summed = jax.tree.map(lambda *parts: sum(parts), *(g for _, g in alone))
    assert_equal_leaves(grads, summed)


@pytest.mark.parametrize("kind", ["gpt2", "llama-2"])
@pytest.mark.parametrize("missing", ["positions", "segments"])
def test_a_packed_row_needs_both_positions_and_segments(kind: str, missing: str) -> None:
    model, (batch, _) = uneven(small(kind)), packed_batch()
    # Rotary angles depend on distances alone: there, positions inside a document may count from anywhere.
    same = kind == "llama-2" and missing == "positions"
    want = next_token_loss(model, batch)[0]
    got = next_token_loss(model, {name: value for name, value in batch.items() if name != missing})[0]
    assert bool(abs(got - want) < 1e-4 * abs(want)) is same


def test_a_document_per_row_is_what_no_segments_say() -> None:
    model, tokens = uneven(small("gpt2")), tokens_of(2)
    plain = model(tokens)
    same = model(tokens, positions=jnp.tile(jnp.arange(LENGTH), (2, 1)), segments=jnp.ones((2, LENGTH), jnp.int32))
    np.testing.assert_allclose(same, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["positions", "segments"])
def test_positions_and_segments_of_another_shape_are_refused(name: str) -> None:
    batch = {"tokens": tokens_of(2, 9), name: jnp.zeros((2, 9), jnp.int32)}
    with pytest.raises(ValueError, match=re.escape(f"{name} have shape (2, 9), but (2, 8)")):
        next_token_loss(uneven(small("llama-2")), batch)


def test_rows_longer_than_the_table_of_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="33 tokens in a row, but learned_positions=32"):
        uneven(small("gpt2"))(tokens_of(1, 33))


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


def assert_equal_leaves(got: Any, want: Any, rtol: float = 1e-5) -> None:
    got, want = dict(nnx.to_flat_state(got)), dict(nnx.to_flat_state(want))
    assert got.keys() == want.keys()
    # The gradient of a key's bias is zero without rotary positions (softmax knows no shift): there, rounding is all.
    floor = 1e-2 * max(float(np.linalg.norm(leaf.get_value())) for leaf in want.values())
    for path, leaf in want.items():
        value = np.asarray(leaf.get_value())
        norm = max(float(np.linalg.norm(value)), floor if path[-2:] == ("k", "bias") else 0.0)
        error = float(np.linalg.norm(np.asarray(got[path].get_value()) - value))
        assert error <= rtol * norm, f"{path}: off by {error:.2e}, where its norm is {norm:.2e}"


def on_mesh(config: DecoderConfig, tp: int, batch: dict[str, jax.Array]) -> tuple[jax.Array, nnx.State]:
    if jax.device_count() < tp:
        pytest.skip(f"needs {tp} devices, has {jax.device_count()}")
    mesh = jzero.make_mesh(f"tp={tp}", jax.devices()[:tp])
    with jax.set_mesh(mesh):
        graph, state = nnx.split(uneven(config))
        specs = nnx.get_partition_spec(state)
        shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))
        state, batch = jax.device_put(state, shardings), jax.device_put(batch, NamedSharding(mesh, P(DP)))

        def run(state: nnx.State, batch: dict[str, jax.Array]) -> tuple[jax.Array, nnx.State]:
            model = nnx.merge(graph, state)
            return nnx.value_and_grad(lambda model: next_token_loss(model, batch)[0])(model)

        loss, grads = jax.jit(run)(state, batch)
    return loss, jax.device_get(grads)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2.5", "qwen3", "all at once"])
def test_outputs_and_gradients_are_those_of_one_device_at_tp_2_and_4(kind: str) -> None:
    """Biases nonzero: that of a row-parallel layer is added once, whatever tp is."""
    config = small(kind, heads=8, kv_heads=4, mlp_width=64)
    batch, _ = packed_batch()
    want, want_grads = on_mesh(config, 1, batch)
    for tp in (2, 4):
        loss, grads = on_mesh(config, tp, batch)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        assert_equal_leaves(grads, want_grads)


def test_biases_follow_the_outputs_and_norms_of_heads_are_whole() -> None:
    config = small("all at once")
    state = nnx.to_flat_state(nnx.state(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param))
    specs = {"/".join(path): leaf.get_metadata().get("out_sharding") for path, leaf in state}
    split = ["attention/q", "attention/k", "attention/v", "mlp/gate", "mlp/up"]
    assert all(specs[f"layers/{name}/bias"] == (None, TP) for name in split)
    assert all(specs[f"layers/{name}/bias"] == (None, None) for name in ("attention/o", "mlp/down"))
    assert specs["layers/attention/q_norm/scale"] is None
    assert specs["positions/embedding"] == (None, TP)


# ---- rematerialisation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_remat_policies_give_equal_gradients_with_dropout(kind: str) -> None:
    batch, _ = packed_batch()
    want, want_grads = loss_and_grads(uneven(small(kind, dropout=0.3)), batch)
    for remat in ("dots", "full"):
        loss, grads = loss_and_grads(uneven(small(kind, dropout=0.3, remat=remat)), batch)
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        assert_equal_leaves(grads, want_grads)


def at_stage_3(remat: str) -> jzero.Run:
    if jax.device_count() < 8:
        pytest.skip("the mesh is for 8 devices")
    config = small("qwen3", layers=3, remat=remat)
    batch = {"tokens": jax.ShapeDtypeStruct((8, LENGTH + 1), jnp.int32)}
    mesh = jzero.make_mesh("dp=8", jax.devices()[:8])
    return jzero.setup(lambda: uneven(config), next_token_loss, optax.adamw(1e-3), mesh, batch, stage=3)


def test_saved_matmuls_save_no_gathered_parameter() -> None:
    """At stage 3 the backward pass gathers what it does without rematerialisation, and the step is the same.

    It gathers scales of norms besides: without rematerialisation what was made of them is kept.
    """
    traffic, losses, norms = {}, {}, {}
    for remat in ("none", "dots"):
        run = at_stage_3(remat)
        program = run.lower()["step"].compile()
        traffic[remat] = hlo.traffic(hlo.collectives(program, run.mesh), by=("kind",))
        _, metrics = run.step(run.init(), {"tokens": np.asarray(tokens_of(8, LENGTH + 1))})
        losses[remat], norms[remat] = float(metrics["loss"]), float(metrics["grad_norm"])
    assert traffic["dots"]["all-gather",] >= traffic["none"]["all-gather",]
    assert losses["dots"] == pytest.approx(losses["none"], rel=1e-6)
    assert norms["dots"] == pytest.approx(norms["none"], rel=1e-5)


# ---- what reaches JAX's attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [0, 2])
@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_windows_and_segments_reach_every_implementation(
    implementation: Any, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    attend = jax.nn.dot_product_attention

    def spy(*args: jax.Array, implementation: str | None, **rest: Any) -> jax.Array:
        seen.append({"implementation": implementation, "heads": args[0].shape[2], **rest})
        return attend(*args, **rest)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    q, k, segments = jnp.ones((1, 6, 4, 8)), jnp.ones((1, 6, 2, 8)), jnp.array([[0, 0, 0, 1, 1, 1]])

    def run(*args: jax.Array) -> jax.Array:
        return causal_attention(*args, window=3, implementation=implementation)

    if tp:
        if jax.device_count() < tp:
            pytest.skip(f"needs {tp} devices")
        with jax.set_mesh(jzero.make_mesh(f"tp={tp}", jax.devices()[:tp])):
            jax.jit(run)(q, k, k, segments)
    else:
        run(q, k, k, segments)
    (call,) = seen
    assert call["implementation"] == implementation
    assert call["local_window_size"] == (2, 0)
    assert call["is_causal"]
    assert call["mask"].shape == (1, 1, 6, 6)
    assert call["heads"] == 4 // max(tp, 1)


# ---- combinations that are refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 0}, "head_dim=0: must be greater than 0"),
        ({"head_dim": 7}, "head_dim=7: rotary positions turn pairs, so the size must be even"),
        ({"norm": "batch"}, "norm='batch': must be one of 'rms', 'layer'"),
        ({"mlp": "relu"}, "mlp='relu': must be one of 'swiglu', 'gelu'"),
        ({"biases": True}, "biases=True: must be one of 'none', 'qkv', 'all'"),
        ({"learned_positions": 0}, "learned_positions=0: must be greater than 0"),
        ({"learned_positions": 8, "rope_theta": 5e5}, "rope_theta=500000.0 has no effect: learned_positions=8"),
        ({"learned_positions": 8, "rope_scaling": "linear"}, "rope_scaling=linear has no effect: learned_positions=8"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn': must be one of None, 'linear', 'llama3'"),
        ({"rope_factor": 8.0}, "rope_factor=8.0 has no effect: rope_scaling is none, not linear or llama3"),
        ({"rope_scaling": "linear", "rope_factor": 0.5}, "rope_factor=0.5: must be at least 1"),
        (
            {"rope_scaling": "linear", "rope_high_freq_factor": 8.0},
            "rope_high_freq_factor=8.0 has no effect: rope_scaling is linear, not llama3",
        ),
        (
            {"rope_scaling": "llama3", "rope_high_freq_factor": 1.0},
            "rope_low_freq_factor=1.0 must be less than rope_high_freq_factor=1.0",
        ),
        ({"window": 0}, "window=0: must be greater than 0"),
        ({"attention": "cudnn"}, "attention='cudnn' computes in 16 bits, not in dtype=float32"),
        (
            {"attention": "cudnn", "dtype": "bfloat16", "head_dim": 20},
            "attention='cudnn' takes heads of up to 128 that 8 divides, not head size 20",
        ),
    ],
)
def test_what_does_not_fit_or_has_no_effect_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DecoderConfig(**({"width": 32, "layers": 1, "heads": 4, "kv_heads": 2, "mlp_width": 48} | changes))


def test_learned_positions_allow_heads_of_odd_size() -> None:
    assert DecoderConfig(12, 1, 4, 4, 24, learned_positions=8).head_size == 3
