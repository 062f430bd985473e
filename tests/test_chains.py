"""The named optimizers: their formulas, which parameters decay and which are orthogonalised, and what they refuse."""

import functools
import re
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from tiny_decoder import batches, decoder

import jzero
from jzero.chains import hidden_matrices, make_optimizer, matrices
from jzero.models.decoder import next_token_loss
from jzero.recipes import RECIPES, OptimizerName
from jzero.zero import path_name

NAMES = get_args(OptimizerName)


def test_every_name_has_a_recipe_and_a_chain():
    assert tuple(RECIPES) == NAMES == ("adamw", "lion", "adafactor", "sgd", "muon")
    for name in NAMES:
        make_optimizer(name, 0.1)


# ---- which parameters -----------------------------------------------------------------------------------------------


def per_layer(model_fn, loss_fn=next_token_loss, batch=None) -> dict:
    batch = batches(1, 4)[0] if batch is None else batch
    mesh = jzero.make_mesh("dp=2", jax.devices()[:2])
    return jzero.setup(model_fn, loss_fn, lambda _: optax.sgd(0.1), mesh, batch).per_layer


def chosen(tree) -> set[str]:
    return {path_name(path) for path, yes in flatten_dict(tree).items() if yes}


def kernels(prefix: str) -> set[str]:
    mlp, attention = ("gate", "up", "down"), ("q", "k", "v", "o")
    return {f"{prefix}/mlp/{k}/kernel" for k in mlp} | {f"{prefix}/attention/{k}/kernel" for k in attention}


HIDDEN = {True: kernels("layers"), False: kernels("layers/0") | kernels("layers/1")}


@pytest.mark.parametrize("scan", [True, False], ids=["stacked", "unstacked"])
def test_matrices_decay_and_hidden_ones_are_orthogonalised_whatever_is_stacked(scan):
    read = per_layer(decoder(scan=scan))
    assert chosen(hidden_matrices(read)) == HIDDEN[scan]
    assert chosen(matrices(read)) == HIDDEN[scan] | {"embedding/embedding", "head/kernel"}
    rest = flatten_dict(read).keys() - {
        tuple(path) for path in flatten_dict(read) if flatten_dict(matrices(read))[path]
    }
    assert {path[-1] for path in rest} == {"scale"}
    assert all(flatten_dict(read)[path].shape == (32,) for path in rest)


class LikeGPT2(nnx.Module):
    """Learned positions, LayerNorms, biases everywhere, a tied head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding, self.positions = nnx.Embed(96, 8, rngs=rngs), nnx.Param(jnp.zeros((8, 8)))
        self.blocks = nnx.vmap(lambda key: self.block(nnx.Rngs(key)))(jax.random.split(rngs.params(), 3))

    def block(self, rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(
            nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 32, rngs=rngs), nnx.gelu, nnx.Linear(32, 8, rngs=rngs)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.embedding.embedding[...]
        x = table[tokens] + self.positions[...]
        x = nnx.scan(lambda block, x: x + block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        return x @ table.T


def test_biases_and_norms_of_a_stack_do_not_decay_though_their_arrays_have_rank_2():
    read = per_layer(lambda: LikeGPT2(nnx.Rngs(0)))
    inside = {"blocks/layers/1/kernel", "blocks/layers/3/kernel"}
    assert chosen(matrices(read)) == inside | {"embedding/embedding", "positions"}
    assert chosen(hidden_matrices(read, ("*embed*", "positions"))) == inside
    assert {path_name(path) for path, x in flatten_dict(read).items() if x.ndim == 1} == {
        f"blocks/layers/{i}/{kind}" for i, kind in [(0, "scale"), (0, "bias"), (1, "bias"), (3, "bias")]
    }


def test_of_gpt_2_the_tables_and_the_matrices_decay():
    gpt_2 = {"norm": "layer", "mlp": "gelu", "biases": "all", "learned_positions": 8, "tied": True}
    read = per_layer(decoder(**gpt_2))
    hidden = {path for path in kernels("layers") if "gate" not in path}
    assert chosen(hidden_matrices(read)) == hidden
    tables = chosen(matrices(read)) - hidden
    assert "embedding/embedding" in tables
    assert [path.split("/")[0] for path in sorted(tables)] == ["embedding", "positions"]


def test_a_tensor_of_rank_3_in_its_layer_decays_and_is_not_orthogonalised():
    read = {"attention": {"query": jax.ShapeDtypeStruct((8, 2, 4), "float32")}}
    assert chosen(matrices(read)) == {"attention/query"}
    assert chosen(hidden_matrices(read)) == set()


SHAPES = {
    ("embed", "table"): (6, 4),
    ("layers", "kernel"): (3, 4, 5),
    ("layers", "scale"): (3, 4),
    ("layers", "gain"): (3,),
    ("norm", "scale"): (4,),
    ("temperature",): (),
}
STACKED = {path: int(path[0] == "layers") for path in SHAPES}
READ = unflatten_dict({path: jax.ShapeDtypeStruct(s[STACKED[path] :], "float32") for path, s in SHAPES.items()})


def filled(value: float) -> dict:
    return unflatten_dict({path: jnp.full(shape, value) for path, shape in SHAPES.items()})


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_decoupled_from_the_gradient_and_times_the_rate_under_every_optimizer(name):
    with_decay, without = (make_optimizer(name, lambda _: 0.5, READ, weight_decay=decay) for decay in (0.1, 0.0))
    params, grads = filled(2.0), jax.tree.map(jnp.sin, filled(3.0))
    one, other = (tx.update(grads, tx.init(params), params)[0] for tx in (with_decay, without))
    by = flatten_dict(jax.tree.map(lambda a, b: np.unique(np.round(b - a, 5)).tolist(), one, other))
    expected = {path: [0.1] if path in {("embed", "table"), ("layers", "kernel")} else [0.0] for path in SHAPES}
    assert by == {p: pytest.approx(v, abs=1e-5) for p, v in expected.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_trains_as_the_list_of_its_layers(name):
    """Also where a tensor is looked at whole: Adafactor's root mean square and dims, Muon's matrices."""
    N, D, F = 3, 160, 130  # large enough for Adafactor to factor a layer, and N x D is not to be factored
    keys = iter(jax.random.split(jax.random.key(0), 9))
    scales = jnp.float32([1.0, 10.0, 0.1])[:, None, None]
    kernel, gain = scales * jax.random.normal(next(keys), (N, D, F)), 1.0 + jax.random.normal(next(keys), (N, D))
    stacked = {"stack": {"kernel": kernel, "gain": gain}}
    listed = {"list": {i: {"kernel": kernel[i], "gain": gain[i]} for i in range(N)}}
    read = {"stack": {"kernel": kernel[0], "gain": gain[0]}}
    txs = [make_optimizer(name, 1e-2, per_layer) for per_layer in (read, listed)]
    states = [tx.init(params) for tx, params in zip(txs, (stacked, listed), strict=True)]
    for _ in range(2):
        grad = {
            "kernel": scales**2 * jax.random.normal(next(keys), (N, D, F)),
            "gain": jax.random.normal(next(keys), (N, D)),
        }
        grads = [{"stack": grad}, {"list": {i: jax.tree.map(lambda x, i=i: x[i], grad) for i in range(N)}}]
        for i, params in enumerate((stacked, listed)):
            updates, states[i] = txs[i].update(grads[i], states[i], params)
            params.update(optax.apply_updates(params, updates))
    for i in range(N):
        of_layer = jax.tree.map(lambda x, i=i: x[i], stacked["stack"])
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), of_layer, listed["list"][i])


# ---- formulas -------------------------------------------------------------------------------------------------------


def trained(tx: optax.GradientTransformation, steps: int = 3, shape: tuple[int, ...] = (4, 6)) -> np.ndarray:
    params = {"w": jax.random.normal(jax.random.key(0), shape)}
    state = tx.init(params)
    for k in range(steps):
        grads = {"w": jax.random.normal(jax.random.key(k + 1), shape)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"])


def rate(k):
    return 0.01 * (k + 1)


# What optax says under the same name; where its decay is not times the rate, none is compared.
SAME = {
    "adamw": optax.adamw(rate, b2=0.95, weight_decay=0.1),
    "lion": optax.lion(rate, weight_decay=0.3),
    "adafactor": optax.adafactor(rate),
    "sgd": optax.sgd(rate, momentum=0.9),
    "muon": optax.contrib.muon(rate, weight_decay=0.1, consistent_rms=0.2),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_the_optimizer_of_that_name(name):
    np.testing.assert_allclose(trained(make_optimizer(name, rate)), trained(SAME[name]), rtol=1e-5)


SET = [
    (
        "adamw",
        {"b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.2},
        optax.adamw(rate, 0.8, 0.9, 1e-3, weight_decay=0.2),
    ),
    ("lion", {"b1": 0.8, "b2": 0.7, "weight_decay": 0.2}, optax.lion(rate, 0.8, 0.7, weight_decay=0.2)),
    ("adafactor", {"eps": 0.5}, optax.adafactor(rate, eps=0.5)),
    ("sgd", {"momentum": 0.5, "nesterov": True}, optax.sgd(rate, 0.5, nesterov=True)),
    ("sgd", {"momentum": 0.0}, optax.sgd(rate)),
    (
        "muon",
        {"momentum": 0.5, "nesterov": False, "weight_decay": 0.0, "eps": 0.3},
        optax.contrib.muon(rate, beta=0.5, eps=0.3, nesterov=False, consistent_rms=0.2),
    ),
    (
        "muon",
        {"adamw_leaves": ("w",), "b1": 0.5, "b2": 0.6, "eps": 0.1},
        optax.adamw(rate, 0.5, 0.6, 0.1, weight_decay=0.1),
    ),
]


@pytest.mark.parametrize(("name", "settings", "wanted"), SET)
def test_a_setting_is_the_one_that_it_says(name, settings, wanted):
    got = trained(make_optimizer(name, rate, **settings))
    np.testing.assert_allclose(got, trained(wanted), rtol=1e-5)
    assert not np.allclose(got, trained(make_optimizer(name, rate)), rtol=1e-3)


def test_adamw_is_the_algorithm_of_the_paper():
    params, grads = {"w": jnp.float32([[1.0, -2.0]])}, {"w": jnp.float32([[0.3, 5.0]])}
    tx = make_optimizer("adamw", lambda k: 0.1 * (k + 1), weight_decay=0.2, b1=0.8, b2=0.9, eps=1e-3)
    state, w = tx.init(params), np.float64([[1.0, -2.0]])
    m = v = np.zeros_like(w)
    for k in range(3):  # Loshchilov and Hutter 2019, algorithm 2
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        g = np.float64(grads["w"])
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        step = m / (1 - 0.8 ** (k + 1)) / (np.sqrt(v / (1 - 0.9 ** (k + 1))) + 1e-3)
        w = w - 0.1 * (k + 1) * (step + 0.2 * w)
    np.testing.assert_allclose(params["w"], w, rtol=1e-5)


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_muon_moves_a_matrix_by_an_orthogonal_one_of_the_size_of_adamw_s_updates(shape):
    tx = make_optimizer("muon", 1.0, weight_decay=0.0)
    params, grads = {"w": jnp.zeros(shape)}, {"w": jax.random.normal(jax.random.key(0), shape)}
    update = np.asarray(tx.update(grads, tx.init(params), params)[0]["w"])
    # Five Newton-Schulz steps leave singular values between about 0.7 and 1.2 where the gradient's are not tiny.
    singular = np.linalg.svd(update, compute_uv=False) / (0.2 * max(shape) ** 0.5)
    assert 0.3 < singular.min() <= singular.max() < 1.3
    assert np.sum(update * np.asarray(grads["w"])) < 0
    assert np.sqrt(np.mean(update**2)) == pytest.approx(0.2, rel=0.3)


# ---- precision ------------------------------------------------------------------------------------------------------

EVERYTHING = jzero.Precision(params="bfloat16", grads="bfloat16", reduce="bfloat16")


@pytest.mark.parametrize(
    ("precision", "born"),
    [(EVERYTHING, "float32"), (jzero.Precision(), "bfloat16"), (jzero.Precision(params="float32"), "bfloat16")],
)
@pytest.mark.parametrize("name", NAMES)
def test_all_that_an_optimizer_holds_is_float32_before_and_after_a_step(name, precision, born):
    def tx(per_layer):
        plateau = optax.contrib.reduce_on_plateau()
        return jzero.averaged(make_optimizer(name, 0.1, per_layer, plateau=plateau), 0.9)

    model_fn = decoder(param_dtype=born, dtype=precision.params or born)
    mesh = jzero.make_mesh("dp=2", jax.devices()[:2])
    run = jzero.setup(model_fn, next_token_loss, tx, mesh, batches(1, 4)[0], precision=precision)
    held = [x for x in jax.tree.leaves(run.abstract_state.opt_state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    assert {x.dtype for x in held} == {jnp.dtype("float32")}
    params = jax.tree.leaves(run.abstract_state.params)
    assert {x.dtype for x in params} == {jnp.dtype(precision.params or born)}
    # m, v or factors of them, the average, and the master where parameters are narrower.
    trees = {"adamw": 2, "muon": 1, "lion": 1, "sgd": 1, "adafactor": 0}[name] + 1 + (params[0].dtype != "float32")
    assert sum(x.size for x in held) >= trees * sum(x.size for x in params)
    after, metrics = run.lower()["step"].out_info
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), run.abstract_state
    )
    assert metrics["lr"].dtype == "float32"


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("adam", {}, "optimizer 'adam' is not one of adamw, lion, adafactor, sgd, muon"),
        ("adamw", {"momentum": 0.9}, "momentum = 0.9: adamw has none; it takes weight_decay, b1, b2, eps"),
        ("sgd", {"b1": 0.9}, "b1 = 0.9: sgd has none; it takes weight_decay, momentum, nesterov"),
        ("lion", {"eps": 1e-8}, "eps = 1e-08: lion has none"),
        ("adafactor", {"b2": 0.9}, "b2 = 0.9: adafactor has none"),
        ("adamw", {"betas": 0.9}, "betas = 0.9: adamw has none"),
        (
            "muon",
            {"adamw_leaves": ("*tabel*",)},
            r"adamw_leaves: no parameter matches '\*tabel\*'; there are embed/table",
        ),
    ],
)
def test_what_an_optimizer_does_not_take_is_an_error_that_names_it(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(name, 0.1, READ, **settings)


def test_a_setting_of_none_is_not_given():
    make_optimizer("sgd", 0.1, b1=None, weight_decay=None)


def test_what_a_function_makes_must_be_a_transformation():
    mesh = jzero.make_mesh("dp=1", jax.devices()[:1])
    with pytest.raises(TypeError, match="what tx made of the parameters must be an optax transformation"):
        jzero.setup(decoder(), next_token_loss, lambda per_layer: 3, mesh, batches(1, 4)[0])


# ---- the README -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_gives_the_defaults_that_are(name):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    _, _, lr, decay, others, _ = (cell.strip() for cell in row.split("|"))
    recipe = RECIPES[name]
    assert (float(lr), float(decay)) == (recipe.lr, recipe.settings["weight_decay"])
    for key, value in recipe.settings.items():
        if isinstance(value, bool):
            assert f"{key} {str(value).lower()}" in others
        elif isinstance(value, tuple):
            assert f"{key} `{','.join(value)}`" in others
        elif key != "weight_decay":
            assert re.search(rf"\b{key} {value:g}".replace("e-0", "e-"), others)
