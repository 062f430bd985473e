"""Every optimizer that optax ships is placed by its parameters and held in float32, and is given the loss."""

import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.mesh import AXES
from jzero.optim import WithMaster, with_master
from jzero.zero import opt_state_specs

# ---- every optimizer ------------------------------------------------------------------------------------------------
# Shapes are told apart by size: no two parameters, and no factor of one (Adafactor's rows), agree.

MESH = AbstractMesh((1, 4, 2), AXES, axis_types=(AxisType.Auto,) * 3)
PARAMS = {
    ("embedding", "table"): ((1024, 256), P("dp", "tp")),
    ("layers", "up", "kernel"): ((3, 256, 384), P(None, "dp", "tp")),
    ("layers", "square", "kernel"): ((3, 128, 128), P(None, "dp", None)),
    ("layers", "norm", "scale"): ((3, 160), P(None, "dp")),
    ("norm", "scale"): ((320,), P("dp")),
    ("bias",): ((7,), P(None)),
    ("temperature",): ((), P()),
}
BY_SHAPE = {shape: spec for shape, spec in PARAMS.values() if math.prod(shape) > 7}
SMALLEST_MATRIX = 3 * 128 * 128

IS_MATRIX = unflatten_dict({path: len(shape) > 1 for path, (shape, _) in PARAMS.items()})
LABELS = unflatten_dict({path: "a" if len(shape) > 1 else "b" for path, (shape, _) in PARAMS.items()})
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)


def always(*_, **__):
    return True


# How to build what a learning rate alone does not build.
BUILD: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=0),
    "apply_if_finite": lambda: optax.apply_if_finite(ADAM, 3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, mask=IS_MATRIX), optax.ema(0.9)),
    "clip": lambda: optax.clip(1.0),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "conditionally_mask": lambda: optax.conditionally_mask(ADAM, always),
    "conditionally_transform": lambda: optax.conditionally_transform(ADAM, always),
    "differentially_private_aggregate": lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0),
    "dpsgd": lambda: optax.contrib.dpsgd(0.1, 1.0, 0.1, 0),
    "ema": lambda: optax.ema(0.9),
    "flatten": lambda: optax.flatten(ADAM),
    "freeze": lambda: optax.freeze(IS_MATRIX),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(0.1),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adamw)(0.1),
    "lookahead": lambda: optax.lookahead(ADAM, 5, 0.5),
    "masked": lambda: optax.masked(ADAM, IS_MATRIX),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda updates, **_: optax.tree.norm(updates), 0.9),
    "mechanize": lambda: optax.contrib.mechanize(ADAM),
    "monitor": lambda: optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)}),
    "multi_transform": lambda: optax.multi_transform({"a": ADAM, "b": SGD}, LABELS),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", ADAM)),
    "partition": lambda: optax.partition({"a": optax.contrib.muon(0.1), "b": ADAM}, LABELS),
    "sam": lambda: optax.contrib.sam(SGD, optax.adam(0.1)),
    "scale": lambda: optax.scale(0.1),
    "scale_by_backtracking_linesearch": lambda: optax.scale_by_backtracking_linesearch(3),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda _: 0.1),
    "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(3),
    "schedule_free": lambda: optax.contrib.schedule_free(ADAM, 0.1),
    "selective_transform": lambda: optax.selective_transform(ADAM, freeze_mask=IS_MATRIX),
    "snapshot": lambda: optax.snapshot("norm", lambda updates, **_: optax.tree.norm(updates)),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(ADAM),
    "stateless": lambda: optax.stateless(lambda updates, _: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda update, _: update),
    "trace": lambda: optax.trace(0.9),
    "with_extra_args_support": lambda: optax.with_extra_args_support(ADAM),
    # Ours: what nests deepest, and the class among the functions.
    "MultiSteps": lambda: optax.MultiSteps(optax.chain(optax.clip(1.0), ADAM), 4),
    "MultiSteps of a masked, injected partition": lambda: optax.MultiSteps(
        optax.masked(optax.inject_hyperparams(optax.adam)(0.1), IS_MATRIX), 2
    ).gradient_transformation(),
    "adafactor that factors small matrices": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop centered": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
    "lamb in a lookahead-free chain": lambda: optax.chain(optax.lamb(0.1), optax.contrib.reduce_on_plateau()),
}

# Functions of optax that make transformations and do not say so in their annotation.
UNANNOTATED = {"scale_by_factored_rms", "dog", "dowg", "hutchinson_estimator_diag_hessian", "monitor"}

# State of the size of a matrix that no parameter's spec fits, so it is whole on every device.
WHOLE = {
    "flatten": "joins all parameters in one vector, which belongs to none of them",
    "galore": "projections have a dim that their parameter lacks",
    "scale_by_galore": "projections have a dim that their parameter lacks",
}

# Those that a step with gradients, parameters and the loss cannot run: what they need beside them, or cannot take.
NEEDS_MORE = {
    "differentially_private_aggregate": "a gradient for each example",
    "dpsgd": "a gradient for each example",
    "hutchinson_estimator_diag_hessian": "the loss as a function",
    "lbfgs": "the loss as a function, for its line search",
    "lookahead": "two sets of parameters",
    "measure_with_ema": "nobody who applies its result, which is a measure and no update",
    "monitor": "a state that may grow at the first step",
    "scale_by_backtracking_linesearch": "the loss as a function",
    "scale_by_muon": "the matrices among the parameters, which muon tells it",
    "scale_by_zoom_linesearch": "the loss as a function",
    "sophia": "the loss as a function",
}
NO_SCALARS = {"sm3", "scale_by_sm3", "scale_by_distance_over_gradients"}

# What these warn of has no other spelling, or is what is to be tested.
DEPRECATED = ("optimistic_adam", "inject_stateful_hyperparams", '"seed" is deprecated')
pytestmark = [
    *[pytest.mark.filterwarnings(f"ignore:.*{text}.*:DeprecationWarning") for text in DEPRECATED],
    pytest.mark.filterwarnings(
        "ignore:Specifying a key will be required:UserWarning"
    ),  # noisy_sgd, of its own add_noise
]


def factories() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Everything public in optax and optax.contrib that makes a gradient transformation."""
    found = {}
    for module in (optax, optax.contrib):
        for name, function in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            if name in UNANNOTATED or "GradientTransformation" in str(inspect.signature(function).return_annotation):
                found[name] = function
    return found


def build(name: str) -> optax.GradientTransformation:
    if name in BUILD:
        return BUILD[name]()
    factory = factories()[name]
    takes = inspect.signature(factory).parameters
    return factory(**{"learning_rate": 0.1} if "learning_rate" in takes else {})


NAMES = sorted({*factories(), *BUILD})


def values(dtype: str = "float32"):
    return unflatten_dict({path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, _) in PARAMS.items()})


def init_of(name: str, tx: optax.GradientTransformation) -> Callable:
    return (lambda x: tx.init(optax.LookaheadParams(x, x))) if name == "lookahead" else tx.init


def shape_and_dtype(x: jax.ShapeDtypeStruct) -> tuple:
    return x.shape, x.dtype  # whether a dtype is weak does not matter


def leaves_of(tree) -> dict[str, object]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def test_the_list_of_optimizers_is_not_empty_for_some_new_reason():
    assert {"adamw", "adafactor", "lion", "sgd", "lamb", "muon", "sm3", "lbfgs", "prodigy", "dog"} <= set(NAMES)
    assert len(NAMES) > 100


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_every_optimizer_is_placed_by_its_parameters(name):
    state = jax.eval_shape(init_of(name, build(name)), values())
    specs = opt_state_specs(state, PARAMS)
    assert jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(state)
    shapes, specs = leaves_of(state), leaves_of(specs)
    for where, leaf in shapes.items():
        NamedSharding(MESH, specs[where]).shard_shape(leaf.shape)  # raises where a spec does not divide
        if leaf.shape in BY_SHAPE:
            assert specs[where] == BY_SHAPE[leaf.shape], where
        if math.prod(leaf.shape) >= SMALLEST_MATRIX and name not in WHOLE:
            assert any(specs[where]), f"{where} of shape {leaf.shape} is whole"


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_an_optimizer_whose_state_stays_whole_is_rightly_listed(name):
    state = jax.eval_shape(build(name).init, values())
    specs = leaves_of(opt_state_specs(state, PARAMS))
    assert any(x.size >= SMALLEST_MATRIX and not any(specs[where]) for where, x in leaves_of(state).items())


def test_factors_of_a_matrix_have_its_spec_without_the_dim_that_is_gone():
    state = jax.eval_shape(optax.adafactor(0.1).init, values())
    specs, shapes = leaves_of(opt_state_specs(state, PARAMS)), leaves_of(state)
    of_up = {shapes[k].shape: spec for k, spec in specs.items() if "up" in k}
    assert of_up == {(3, 256): P(None, "dp"), (3, 384): P(None, "tp"), (1,): P()}


def test_an_accumulator_for_each_dim_of_a_parameter_belongs_to_the_parameter():
    state = jax.eval_shape(optax.sm3(0.1).init, values())
    specs, shapes = leaves_of(opt_state_specs(state, PARAMS)), leaves_of(state)
    of_table = {shapes[k].shape: spec for k, spec in specs.items() if "table" in k and len(shapes[k].shape) == 1}
    assert of_table == {(1024,): P("dp"), (256,): P("tp")}


# ---- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NAMES if n != "lookahead"])
@pytest.mark.parametrize(
    ("born", "at_rest"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_the_state_of_every_optimizer_is_float32_whatever_the_parameters_are(name, born, at_rest):
    update = with_master(build(name), jax.tree.map(lambda _: jnp.dtype(at_rest), values()))
    state = jax.eval_shape(update.init, values(born))
    narrow = {
        k: x for k, x in leaves_of(state).items() if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype != "float32"
    }
    assert not narrow
    assert isinstance(state, WithMaster) == (at_rest == "bfloat16")


@pytest.mark.parametrize("name", [n for n in NAMES if n not in NEEDS_MORE])
def test_an_update_keeps_the_state_s_shapes_and_dtypes(name):
    wide, narrow = values(), values("bfloat16")
    if name in NO_SCALARS:
        del wide["temperature"], narrow["temperature"]
    update = with_master(build(name), jax.tree.map(lambda x: x.dtype, narrow))
    state = jax.eval_shape(update.init, wide)
    after = jax.eval_shape(update.update, wide, state, narrow, jax.ShapeDtypeStruct((), "float32"))
    assert jax.tree.map(shape_and_dtype, after) == jax.tree.map(shape_and_dtype, (narrow, state))


@pytest.mark.parametrize("name", sorted(NEEDS_MORE))
def test_an_optimizer_that_needs_more_is_rightly_left_out(name):
    def run():
        update = with_master(build(name), jax.tree.map(lambda x: x.dtype, values()))
        state = jax.eval_shape(update.init, values())
        _, after = jax.eval_shape(update.update, values(), state, values(), jax.ShapeDtypeStruct((), "float32"))
        jax.tree.map(lambda *_: None, state, after)  # raises where their structures differ

    with pytest.raises((TypeError, ValueError, AttributeError)):  # optax says it in many ways
        run()


def test_a_master_starts_as_the_value_was_born_and_the_parameter_is_its_rounding():
    born = {"narrow": jnp.float32([1 + 2**-12, 3.0]), "wide": jnp.float32([1 + 2**-12])}
    dtypes = {"narrow": jnp.dtype("bfloat16"), "wide": jnp.dtype("float32")}
    update = with_master(optax.sgd(2.0**-12), dtypes)
    state = update.init(born)
    assert state.master["wide"] == optax.MaskedNode()  # a parameter that rests in float32 is its own master
    np.testing.assert_array_equal(state.master["narrow"], born["narrow"])

    at_rest = jax.tree.map(lambda x, dtype: x.astype(dtype), born, dtypes)
    for _ in range(2**5):  # steps that bfloat16 alone would lose: 1 - 2**-12 is 1 there
        at_rest, state = update.update(jax.tree.map(jnp.ones_like, born), state, at_rest, jnp.float32(0))
    expected = born["narrow"] - 2.0**-7
    np.testing.assert_array_equal(state.master["narrow"], expected)
    np.testing.assert_array_equal(at_rest["narrow"], expected.astype(jnp.bfloat16))
    np.testing.assert_array_equal(at_rest["wide"], born["wide"] - 2.0**-7)


def test_who_asks_for_the_loss_gets_it():
    update = with_master(optax.contrib.reduce_on_plateau(factor=0.5, patience=1), {"w": jnp.dtype("float32")})
    params = {"w": jnp.zeros(2)}
    state = update.init(params)
    for loss, best, scale in [(3.0, 3.0, 1.0), (2.0, 2.0, 1.0), (2.5, 2.0, 0.5), (2.5, 2.0, 0.25), (1.0, 1.0, 0.25)]:
        params, state = update.update({"w": jnp.zeros(2)}, state, params, jnp.float32(loss))
        assert (float(state.best_value), float(state.scale)) == (best, scale)


def test_the_polyak_step_is_the_loss_over_the_squared_gradient():
    update = with_master(optax.polyak_sgd(max_learning_rate=100.0), {"w": jnp.dtype("float32")})
    params = {"w": jnp.float32([1.0, 1.0])}
    params, _ = update.update({"w": jnp.float32([3.0, 4.0])}, update.init(params), params, jnp.float32(50.0))
    np.testing.assert_allclose(params["w"], [1.0 - 2 * 3.0, 1.0 - 2 * 4.0])
