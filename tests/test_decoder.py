"""Scan, remat, dtype and tp change how the decoder computes, not what; `test_decoder_variants.py` says what that is."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.mesh import AXES, DP, NODE, TP
from jzero.models.attention import causal_attention
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss
from jzero.models.positions import Rope, rotary_angles, rotate

SMALL = DecoderConfig(vocab=61, width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, tied=True)


def _config(**changes: Any) -> DecoderConfig:
    return dataclasses.replace(SMALL, **changes)


def _decoder(config: DecoderConfig, seed: int = 0) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(seed))


def _tokens(batch: int = 2, length: int = 9, vocab: int = SMALL.vocab, seed: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, vocab)


def _flat(model: Decoder) -> dict[tuple[Any, ...], jax.Array]:
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _loss_and_grads(model: Decoder, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[tuple[Any, ...], jax.Array]]:
    """Gradients by path, one leaf per layer, whether the layers are stacked or listed."""

    @nnx.jit
    def run(model: Decoder, batch: dict[str, jax.Array]) -> tuple[jax.Array, nnx.State]:
        return nnx.value_and_grad(lambda model: next_token_loss(model, batch)[0])(model)

    loss, grads = run(model, batch)
    leaves = {}
    for path, leaf in nnx.to_flat_state(grads):
        value = leaf.get_value()
        per_layer = {("layers", i, *path[1:]): value[i] for i in range(SMALL.layers)}
        is_stacked = path[0] == "layers" and not isinstance(path[1], int)
        leaves |= per_layer if is_stacked else {path: value}
    return loss, leaves


def _assert_equal_leaves(got: dict[Any, Any], want: dict[Any, Any], rtol: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    for path, value in want.items():
        scale = float(jnp.abs(value).max())
        np.testing.assert_allclose(got[path], value, rtol=rtol, atol=rtol * scale, err_msg=str(path))


# ---- what it computes -----------------------------------------------------------------------------------------------


def _enlarged(model: Decoder) -> Decoder:
    """Weights ten times as large and scales that differ: initial values hide faults near zero."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    keys = iter(jax.random.split(jax.random.key(7), 100))
    params = jax.tree.map(lambda x: 10 * x * (1 + 0.1 * jax.random.normal(next(keys), x.shape)), params)
    return nnx.merge(graph, params, rest)


def test_tied_head_is_the_embedding_transposed() -> None:
    tied, untied = _decoder(_config(tied=True)), _decoder(_config(tied=False))
    untied.head.kernel[...] = untied.embedding.embedding[...].T
    np.testing.assert_allclose(tied(_tokens()), untied(_tokens()), rtol=1e-5, atol=1e-6)


def test_a_token_changes_no_logits_before_it_and_some_at_and_after_it() -> None:
    model, tokens, t = _enlarged(_decoder(SMALL)), _tokens(), 5
    changed = tokens.at[:, t].set((tokens[:, t] + 1) % SMALL.vocab)
    before, after = model(tokens), model(changed)
    np.testing.assert_array_equal(before[:, :t], after[:, :t])
    moved = jnp.abs(before[:, t:] - after[:, t:]).max(axis=(0, 2))
    assert (moved > 1e-3).all()


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    angles = rotary_angles(jnp.arange(40)[None, :], Rope(16, 10000.0))

    def product(at_q: int, at_k: int) -> float:
        return float(jnp.sum(rotate(q, angles[:, at_q : at_q + 1]) * rotate(k, angles[:, at_k : at_k + 1])))

    assert product(7, 3) == pytest.approx(product(31, 27), rel=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), rel=1e-2)
    np.testing.assert_array_equal(rotate(q, angles[:, :1]), q)


def test_first_loss_is_near_that_of_a_uniform_guess() -> None:
    total, weight = next_token_loss(_decoder(_config(tied=False)), {"tokens": _tokens(8, 33)})
    assert float(total / weight) == pytest.approx(np.log(SMALL.vocab), abs=0.1)


# ---- the loss -------------------------------------------------------------------------------------------------------


def test_loss_is_the_sum_of_minus_log_probabilities_and_the_count() -> None:
    model, tokens = _decoder(SMALL), _tokens()
    log_probabilities = jax.nn.log_softmax(model(tokens[:, :-1]))
    want = -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1).sum()
    total, weight = next_token_loss(model, {"tokens": tokens})
    assert float(total) == pytest.approx(float(want), rel=1e-5)
    assert float(weight) == tokens[:, 1:].size
    assert total.dtype == weight.dtype == jnp.float32


def test_weights_scale_single_tokens_and_zero_leaves_them_out() -> None:
    model, tokens = _decoder(SMALL), _tokens(1, 9)
    weights = jnp.zeros((1, 8)).at[0, 2].set(1.0).at[0, 5].set(0.5)
    losses = [float(next_token_loss(model, {"tokens": tokens, "weights": jnp.eye(8)[i][None]})[0]) for i in (2, 5)]
    total, weight = next_token_loss(model, {"tokens": tokens, "weights": weights})
    assert float(total) == pytest.approx(losses[0] + 0.5 * losses[1], rel=1e-5)
    assert float(weight) == 1.5
    assert abs(losses[0] - losses[1]) > 1e-4


def test_weights_of_another_shape_are_refused() -> None:
    batch = {"tokens": _tokens(2, 9), "weights": jnp.ones((2, 9))}
    with pytest.raises(ValueError, match=re.escape("weights have shape (2, 9), but (2, 8)")):
        next_token_loss(_decoder(SMALL), batch)


def test_untied_embedding_rows_of_absent_tokens_get_a_gradient_of_exactly_zero() -> None:
    tokens = _tokens(vocab=20)
    _, grads = _loss_and_grads(_decoder(_config(tied=False)), {"tokens": tokens})
    rows = jnp.abs(grads["embedding", "embedding"]).max(axis=1)
    read = jnp.isin(jnp.arange(SMALL.vocab), tokens[:, :-1])
    assert (rows[~read] == 0).all()
    assert (rows[read] > 0).all()


# ---- scan, remat, dropout, dtype: the same function -----------------------------------------------------------------


@pytest.fixture(scope="module")
def looped() -> tuple[jax.Array, dict[Any, jax.Array]]:
    """A plain loop that saves everything: what the other roads are held against."""
    return _loss_and_grads(_decoder(_config(scan=False, remat="none", dropout=0.3)), {"tokens": _tokens()})


@pytest.mark.parametrize(
    ("scan", "remat"), [(True, "none"), (True, "full"), (False, "full"), (True, "dots"), (False, "dots")]
)
def test_scan_and_remat_draw_the_same_dropout_and_give_the_same_gradients(
    scan: bool, remat: str, looped: tuple[jax.Array, dict[Any, jax.Array]]
) -> None:
    loss, grads = _loss_and_grads(_decoder(_config(scan=scan, remat=remat, dropout=0.3)), {"tokens": _tokens()})
    np.testing.assert_allclose(loss, looped[0], rtol=1e-6)
    _assert_equal_leaves(grads, looped[1])


def _temporaries(remat: str) -> int:
    config = _config(layers=6, remat=remat)
    graph, state = nnx.split(nnx.eval_shape(lambda: _decoder(config)))

    def grads(state: nnx.State, tokens: jax.Array) -> nnx.State:
        return jax.grad(lambda state: next_token_loss(nnx.merge(graph, state), {"tokens": tokens})[0])(state)

    lowered = jax.jit(grads).lower(state, jax.ShapeDtypeStruct((4, 65), jnp.int32))
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_remat_keeps_less_for_backward_the_more_it_recomputes() -> None:
    everything, dots, nothing = (_temporaries(remat) for remat in ("none", "dots", "full"))
    assert nothing < 0.7 * dots < 0.7 * everything
    assert nothing < 0.5 * everything


def test_dropout_differs_from_step_to_step_and_from_layer_to_layer_and_ends_in_evaluation() -> None:
    model, tokens = _decoder(_config(dropout=0.5)), _tokens()
    first, second = model(tokens), model(tokens)
    assert not jnp.array_equal(first, second), "a call must advance the random state that the model holds"
    keys = jax.random.key_data(model.layers.mlp_dropout.rngs.key[...])
    assert len(np.unique(keys, axis=0)) == SMALL.layers
    assert (model.layers.mlp_dropout.rngs.count[...] == 2).all()
    model.eval()
    np.testing.assert_array_equal(model(tokens), model(tokens))
    np.testing.assert_allclose(model(tokens), _decoder(SMALL)(tokens), rtol=1e-5, atol=1e-6)


def test_a_model_without_dropout_holds_no_random_state() -> None:
    assert nnx.state(_decoder(SMALL), nnx.RngState) == nnx.State({})


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_computes_layers_in_16_bits_and_losses_in_32(tied: bool) -> None:
    config = _config(tied=tied, dtype="bfloat16", param_dtype="bfloat16")
    model, tokens = _decoder(config), _tokens()
    assert {leaf.dtype for leaf in _flat(model).values()} == {jnp.dtype("bfloat16")}
    assert model(tokens).dtype == jnp.float32
    loss, _ = next_token_loss(model, {"tokens": tokens})
    assert loss.dtype == jnp.float32
    graph, state = nnx.split(model)
    program = str(jax.make_jaxpr(lambda state: nnx.merge(graph, state)(tokens))(state))
    assert "bf16[2,9,48]" in program, "the MLP's hidden activations"
    assert "f32[2,9,48]" not in program
    want, _ = next_token_loss(_decoder(_config(tied=tied)), {"tokens": tokens})
    np.testing.assert_allclose(loss, want, rtol=2e-2)


def test_types_and_ranks_are_promoted_nowhere_by_accident() -> None:
    # float32 alone: the backward of jax's own attention mixes 16 and 32 bits.
    batch = {"tokens": _tokens(), "weights": jnp.ones((2, 8))}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        _loss_and_grads(_decoder(_config(dropout=0.3)), batch)


# ---- tensor parallelism ---------------------------------------------------------------------------------------------

WIDE = DecoderConfig(vocab=61, width=32, layers=2, heads=8, kv_heads=4, mlp_width=48, tied=True)


def _mesh(dp: int, tp: int) -> Mesh:
    if jax.device_count() < dp * tp:
        pytest.skip(f"needs {dp * tp} devices, has {jax.device_count()}")
    devices = np.array(jax.devices()[: dp * tp]).reshape(1, dp, tp)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def _placed(model: Decoder, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    graph, state = nnx.split(model)
    specs = nnx.get_partition_spec(state)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))
    return graph, jax.device_put(state, shardings)


def _on_mesh(config: DecoderConfig, mesh: Mesh, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[Any, Any]]:
    """Loss and gradients under plain jit, every axis left to the compiler."""
    with jax.set_mesh(mesh):
        graph, state = _placed(_decoder(config), mesh)

        def run(state: nnx.State, batch: dict[str, jax.Array]) -> tuple[jax.Array, nnx.State]:
            model = nnx.merge(graph, state)
            return nnx.value_and_grad(lambda model: next_token_loss(model, batch)[0])(model)

        loss, grads = jax.jit(run)(state, jax.device_put(batch, NamedSharding(mesh, P(DP))))
    return loss, {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(grads)}


@pytest.mark.parametrize(
    ("tied", "vocab", "meshes"),
    [(True, 61, [(1, 4)]), (False, 61, [(2, 2)]), (False, 64, [(2, 2), (1, 4)])],
)
def test_tensor_parallelism_changes_neither_loss_nor_gradients(
    tied: bool, vocab: int, meshes: list[tuple[int, int]]
) -> None:
    config = dataclasses.replace(WIDE, tied=tied, vocab=vocab, dropout=0.2)
    batch = {"tokens": _tokens(4, vocab=20)}
    absent = ~np.isin(np.arange(vocab), batch["tokens"][:, :-1])
    want, want_grads = _on_mesh(config, _mesh(1, 1), batch)
    for dp, tp in meshes:
        loss, grads = _on_mesh(config, _mesh(dp, tp), batch)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        _assert_equal_leaves(grads, want_grads)
        assert tied or (grads["embedding", "embedding"][absent] == 0).all()


def test_one_device_without_a_mesh_equals_one_with_a_mesh() -> None:
    batch = {"tokens": _tokens()}
    want, _ = _on_mesh(WIDE, _mesh(1, 1), batch)
    np.testing.assert_allclose(next_token_loss(_decoder(WIDE), batch)[0], want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_runs_in_a_region_manual_over_the_data_parallel_axes(dtype: str) -> None:
    config = dataclasses.replace(WIDE, dtype=dtype, param_dtype=dtype, remat="full")
    mesh, tokens = _mesh(2, 2), _tokens(4)
    with jax.set_mesh(mesh):
        graph, state = _placed(_decoder(config), mesh)

        def local(state: nnx.State, tokens: jax.Array) -> jax.Array:
            def loss(state: nnx.State) -> jax.Array:
                return next_token_loss(nnx.merge(graph, state), {"tokens": tokens})[0]

            total, grads = jax.value_and_grad(loss)(state)
            return total[None] + 0 * sum(jnp.sum(g).astype(jnp.float32) for g in jax.tree.leaves(grads))

        manual = jax.shard_map(
            local, axis_names={NODE, DP}, in_specs=(P(), P((NODE, DP))), out_specs=P((NODE, DP)), check_vma=False
        )
        total = jax.jit(manual)(state, tokens).sum()
    want, _ = next_token_loss(_decoder(config), {"tokens": tokens})
    np.testing.assert_allclose(total, want, rtol=1e-5 if dtype == "float32" else 2e-3)


def test_matrices_are_split_by_column_then_row_and_the_layer_dim_never() -> None:
    graph_state = nnx.state(_decoder(_config(tied=False)), nnx.Param)
    specs = {path: leaf.get_metadata().get("out_sharding") for path, leaf in nnx.to_flat_state(graph_state)}
    columns = [("attention", name) for name in "qkv"] + [("mlp", "gate"), ("mlp", "up")]
    rows = [("attention", "o"), ("mlp", "down")]
    assert all(specs["layers", *name, "kernel"] == (None, None, TP) for name in columns)
    assert all(specs["layers", *name, "kernel"] == (None, TP, None) for name in rows)
    assert specs["embedding", "embedding"] == (None, TP)
    assert specs["layers", "mlp_norm", "scale"] is None


def test_untied_head_splits_the_vocabulary_only_where_it_divides() -> None:
    def spec(vocab: int) -> Any:
        with jax.set_mesh(_mesh(1, 4)):
            model = nnx.eval_shape(lambda: _decoder(_config(tied=False, vocab=vocab)))
        return model.head.kernel.get_metadata()["out_sharding"]

    assert spec(64) == (None, TP)
    assert spec(61) == (TP, None)


def test_heads_that_tp_does_not_divide_are_refused_in_words() -> None:
    q, k = jnp.ones((1, 4, 4, 8)), jnp.ones((1, 4, 2, 8))
    with jax.set_mesh(_mesh(1, 4)), pytest.raises(ValueError, match="tp=4 must divide both heads=4 and kv_heads=2"):
        jax.jit(causal_attention)(q, k, k)


def _collectives_in_layer_loops(tp: int) -> list[str]:
    mesh = _mesh(1, tp)
    with jax.set_mesh(mesh):
        graph, state = _placed(_decoder(WIDE), mesh)

        def run(state: nnx.State, tokens: jax.Array) -> jax.Array:
            return next_token_loss(nnx.merge(graph, state), {"tokens": tokens})[0]

        text = jax.jit(run).lower(state, _tokens()).compile().as_text()
    assert text is not None
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= \S+ ({kinds})\(.*while/body", text)


def test_a_block_costs_one_all_reduce_per_half_and_nothing_else() -> None:
    assert _collectives_in_layer_loops(tp=2) == ["all-reduce", "all-reduce"]
    assert _collectives_in_layer_loops(tp=1) == []


# ---- the configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "heads=4 is not divisible by kv_heads=3"),
        ({"width": 30}, "width=30 is not divisible by heads=4"),
        ({"width": 12}, "heads of odd size 3"),
        ({"layers": 0}, "layers=0: must be greater than 0"),
        ({"vocab": -1}, "vocab=-1: must be greater than 0"),
        ({"dropout": 1.0}, "dropout=1.0: must be at least 0 and below 1"),
        ({"remat": "some"}, "remat='some': must be one of 'none', 'full', 'dots'"),
        ({"dtype": "float16"}, "dtype='float16': must be one of"),
        ({"attention": "flash"}, "attention='flash': must be one of None, 'xla', 'cudnn'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_words(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _config(**changes)


def test_attention_implementation_reaches_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    attend: Callable[..., jax.Array] = jax.nn.dot_product_attention

    def spy(*args: jax.Array, implementation: str | None, **rest: Any) -> jax.Array:
        seen.append(implementation)
        return attend(*args, **rest)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    for name in (None, "xla", "cudnn"):
        _decoder(_config(layers=1, attention=name, dtype="bfloat16"))(_tokens())
    assert list(dict.fromkeys(seen)) == [None, "xla", "cudnn"]
