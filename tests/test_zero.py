"""The stage table as data: which dim of which leaf is sharded over what, at every stage, and why a leaf stays whole."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import zero as zero_lib
from jzero.collectives import AllReduce, Cast, Gather, Identity, Scatter, Then, Transition
from jzero.mesh import AXES
from jzero.zero import (
    Leaf,
    ShardingError,
    Whole,
    Zero,
    layout,
    layouts,
    opt_state_specs,
    shard_bytes,
    shard_dim,
    tp_spec,
)

F32 = 4  # bytes
EVERYWHERE = Zero()
Z = ("dp", "node")  # the order in which ZeRO's axes divide a dim


def mesh_of(node: int = 1, dp: int = 1, tp: int = 1) -> AbstractMesh:
    """No devices: specs follow from sizes alone."""
    return AbstractMesh((node, dp, tp), AXES, axis_types=(AxisType.Auto,) * 3)


DP8, DP4_TP2, HYBRID = mesh_of(dp=8), mesh_of(dp=4, tp=2), mesh_of(node=2, dp=2, tp=2)


def leaf_of(*shape: int, tp: int | None = None, layers: int = 0, path=("blocks", 0, "kernel")) -> Leaf:
    """A float32 leaf of this shape, layer dims included, of which tensor parallelism took dim `tp`."""
    return Leaf(path, shape, layers, P(*["tp" if d == tp else None for d in range(len(shape))]), F32)


def laid_out(leaf: Leaf, mesh: AbstractMesh, stage: int = 3, zero: Zero = EVERYWHERE):
    return layout(leaf, stage, zero, mesh, "float32", "float32")


# ---- which dim ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "shards", "dim"),
    [
        (leaf_of(64, 256), 8, 1),  # the largest
        (leaf_of(256, 64), 8, 0),
        (leaf_of(64, 64), 8, 0),  # of equally large ones the first
        (leaf_of(50257, 768), 8, 1),  # odd vocabularies: another dim
        (leaf_of(32001, 4096), 8, 1),
        (leaf_of(17, 24), 8, 1),
        (leaf_of(768, 50257, tp=0), 8, None),  # ... unless tp took that
        (leaf_of(64, 256, tp=1), 4, 0),  # a dim that tp took is never shared, even if it is the only one that divides
        (leaf_of(7, 256, tp=1), 4, None),
        (leaf_of(256, tp=0), 4, None),
        (leaf_of(96, 8, 8, layers=1), 8, 1),  # layers are never taken, even if they are the largest dim
        (leaf_of(8, 5, layers=1), 8, None),
        (leaf_of(4, 8, 16, 32, layers=2), 8, 3),
        (leaf_of(16, layers=1), 8, None),  # a scalar of each layer
        (leaf_of(), 8, None),
        (leaf_of(1), 8, None),
        (leaf_of(1, 16), 8, 1),
        (leaf_of(0), 8, None),  # nothing to divide
        (leaf_of(0, 16), 8, 1),
        (leaf_of(0, 3), 8, None),
        (leaf_of(17), 8, None),
        (leaf_of(17, 8), 8, 1),
        *[(leaf_of(n), 4, None) for n in (5, 7, 11)],
        (leaf_of(17, 5), 1, 0),  # one device takes anything; `layout` does not ask it
    ],
    ids=lambda x: f"{x.shape}{'' if not any(x.tp_spec) else x.tp_spec}/{x.layer_dims}" if isinstance(x, Leaf) else None,
)
def test_zero_takes_the_largest_dim_that_it_divides_and_nobody_else_took(leaf, shards, dim):
    assert shard_dim(leaf, shards) == dim


@pytest.mark.parametrize(
    ("leaf", "mesh", "zero", "spec"),
    [
        (leaf_of(64, 256), DP8, Zero(), P(None, "dp")),
        (leaf_of(64, 256, tp=1), DP4_TP2, Zero(), P("dp", "tp")),
        (leaf_of(50257, 768, tp=1), DP4_TP2, Zero(), P(None, "tp")),
        (leaf_of(50257, 768), DP4_TP2, Zero(), P(None, "dp")),
        (leaf_of(12, 64, 256, tp=1, layers=1), DP4_TP2, Zero(), P(None, "tp", "dp")),
        (leaf_of(12, 64, 256, tp=2, layers=1), DP4_TP2, Zero(), P(None, "dp", "tp")),
        # Two levels: dp first, so that a gather over node and then over dp is contiguous.
        (leaf_of(64, 256, tp=1), HYBRID, Zero(), P(Z, "tp")),
        (leaf_of(64, 256, tp=1), HYBRID, Zero(axes=("dp", "node")), P(Z, "tp")),
        (leaf_of(2, 256, tp=1), HYBRID, Zero(), P(None, "tp")),
        # Hybrid sharding: shards within a node, replicas across.
        (leaf_of(2, 256, tp=1), HYBRID, Zero(axes=("dp",)), P("dp", "tp")),
        (leaf_of(64, 256, tp=1), HYBRID, Zero(axes=("node",)), P("node", "tp")),
        # An axis of size 1 is no axis.
        (leaf_of(64, 256), mesh_of(node=1, dp=8), Zero(), P(None, "dp")),
        (leaf_of(64, 256), mesh_of(node=8, dp=1), Zero(), P(None, "node")),
        (leaf_of(64, 256), mesh_of(node=512, dp=8), Zero(axes=("dp",)), P(None, "dp")),
    ],
)
def test_the_spec_of_a_sharded_leaf(leaf, mesh, zero, spec):
    assert laid_out(leaf, mesh, zero=zero)[0].params == spec


# ---- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "params", "grads", "opt_state"), [(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 1, 1), (3, 1, 1, 1)]
)
def test_a_stage_is_a_choice_of_three_specs(stage, params, grads, opt_state):
    specs = {0: P(None, "tp"), 1: P(Z, "tp")}
    got, whole = laid_out(leaf_of(64, 256, tp=1), HYBRID, stage)
    assert (got.params, got.grads, got.opt_state) == (specs[params], specs[grads], specs[opt_state])
    assert whole is None


def test_the_module_s_docstring_prints_the_table_that_runs():
    rows = re.findall(r"^ +([0-3]) +(W\S+ \S+) +(W\S+ \S+) +(W\S+ \S+)$", inspect.getdoc(zero_lib) or "", re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(zero_lib.STAGES)
    for stage, *printed in rows:
        got, _ = laid_out(leaf_of(64, 256, tp=1), HYBRID, int(stage))
        shown = {P(None, "tp"): "W[in, out:tp]", P(Z, "tp"): "W[in:Z, out:tp]"}
        assert printed == [shown[spec] for spec in (got.params, got.grads, got.opt_state)]


def moves(collective: Transition) -> list[tuple]:
    """Traffic of a collective, in order: (kind, axes, dim or dtype)."""
    match collective:
        case Then(first, second):
            return moves(first) + moves(second)
        case Gather(dim, axes):
            return [("gather", axes, dim)]
        case Scatter(dim, axes, _, dtype):
            return [("scatter", axes, dim, dtype)]
        case AllReduce(axes, _, dtype):
            return [("sum", axes, dtype)]
        case Identity() | Cast():
            return []
    raise TypeError(collective)


# Of a stacked leaf [layers, in, out:tp]: in use the layer dim is gone, once per step it is there.
GATHER, SCATTER = ("gather", Z, 0), ("scatter", Z, 0, "bfloat16")
GATHER_ALL, SCATTER_ALL, SUM = ("gather", Z, 1), ("scatter", Z, 1, "bfloat16"), ("sum", ("node", "dp"), "bfloat16")


@pytest.mark.parametrize(
    ("stage", "use_forward", "use_backward", "finish", "publish"),
    [
        (0, [], [], [SUM], []),
        (1, [], [], [SCATTER_ALL], [GATHER_ALL]),
        (2, [], [SCATTER], [], [GATHER_ALL]),
        (3, [GATHER], [SCATTER], [], []),
    ],
)
def test_every_collective_is_the_move_between_two_specs(stage, use_forward, use_backward, finish, publish):
    got, _ = layout(leaf_of(3, 64, 256, tp=2, layers=1), stage, Zero(), HYBRID, "bfloat16", "float32")
    assert moves(got.use_forward) == use_forward
    assert moves(got.use_backward) == use_backward
    assert moves(got.finish) == finish
    assert moves(got.publish) == publish
    assert got.moves == bool(use_forward or use_backward)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("leaf", "zero", "left_over"),
    [
        (leaf_of(64, 256, tp=1), Zero(), []),
        (leaf_of(64, 256, tp=1), Zero(axes=("dp",)), [("sum", ("node",), "float32")]),
        (leaf_of(64, 256, tp=1), Zero(axes=("node",)), [("sum", ("dp",), "float32")]),
        (leaf_of(7), Zero(), [("sum", ("node", "dp"), "float32")]),
        (leaf_of(7), Zero(axes=("dp",)), [("sum", ("node", "dp"), "float32")]),
    ],
)
def test_a_gradient_is_summed_over_each_data_parallel_axis_once(stage, leaf, zero, left_over):
    got, _ = laid_out(leaf, HYBRID, stage, zero)
    sums = [m for m in moves(got.use_backward) + moves(got.finish) if m[0] in ("sum", "scatter")]
    assert sorted(axis for m in sums for axis in m[1]) == ["dp", "node"]
    assert [m for m in sums if m[0] == "sum"] == left_over


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mesh", [mesh_of(), mesh_of(tp=8)], ids=str)
def test_where_there_is_one_data_parallel_device_nothing_is_sharded_moved_or_reported(stage, mesh):
    for leaf in (leaf_of(64, 256, tp=1), leaf_of(7), leaf_of()):
        got, whole = laid_out(leaf, mesh, stage)
        assert got.params == got.grads == got.opt_state == leaf.tp_spec
        assert [moves(c) for c in (got.use_forward, got.use_backward, got.finish, got.publish)] == [[], [], [], []]
        assert whole is None


# ---- what stays whole -----------------------------------------------------------------------------------------------

LEAVES = [
    leaf_of(50257, 96, tp=1, path=("embedding", "table")),
    leaf_of(12, 96, 384, tp=2, layers=1, path=("layers", "up", "kernel")),
    leaf_of(12, 96, layers=1, path=("layers", "norm", "scale")),
    leaf_of(96, path=("norm", "scale")),
    leaf_of(17, path=("bias",)),
    leaf_of(path=("temperature",)),
]


def whole_of(stage: int = 3, mesh: AbstractMesh = DP4_TP2, zero: Zero = EVERYWHERE) -> dict[str, Whole]:
    return {w.path: w for w in layouts(LEAVES, stage, zero, mesh, "float32", "float32")[1]}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_leaf_that_cannot_be_sharded_is_reported_with_its_path_shape_bytes_and_reason(stage):
    assert whole_of(stage) == {
        "embedding/table": Whole(
            "embedding/table",
            (50257, 96),
            50257 * 96 * F32,
            "no dim of (50257, 96) that tp left is a multiple of dp=4",
        ),
        "bias": Whole("bias", (17,), 17 * F32, "no dim of (17,) is a multiple of dp=4"),
        "temperature": Whole("temperature", (), F32, "no dim of () is a multiple of dp=4"),
    }


def test_a_reason_counts_all_axes_and_leaves_layers_out():
    leaf = leaf_of(8, 6, layers=1)
    _, whole = laid_out(leaf, mesh_of(node=2, dp=2))
    assert whole is not None
    assert whole.reason == "no dim of (6,) is a multiple of dpxnode=4"
    assert whole.nbytes == 8 * 6 * F32


def test_stage_0_shards_nothing_and_reports_nothing():
    assert whole_of(0, zero=Zero(replicate=("norm/*",), persist_below=10**9)) == {}


def test_persist_below_counts_the_elements_of_one_layer():
    kept = {path for path, whole in whole_of(zero=Zero(persist_below=97)).items() if "persist_below=97" in whole.reason}
    assert kept == {"layers/norm/scale", "norm/scale", "bias", "temperature"}  # 12 × 96 are 96 a layer
    kept = {path for path, whole in whole_of(zero=Zero(persist_below=96)).items() if "persist_below" in whole.reason}
    assert kept == {"bias", "temperature"}  # fewer than, not as many as


def test_what_a_pattern_matches_stays_whole_and_is_reported_with_it():
    got, whole = layouts(LEAVES, 3, Zero(replicate=("*norm/scale", "embedding/*")), DP4_TP2, "float32", "float32")
    reasons = {w.path: w.reason for w in whole}
    assert reasons["norm/scale"] == reasons["layers/norm/scale"] == "zero.replicate '*norm/scale'"
    assert reasons["embedding/table"] == "zero.replicate 'embedding/*'"
    assert got[("norm", "scale")].dim is None
    assert got[("layers", "up", "kernel")].dim == 1


@pytest.mark.parametrize("stage", range(4))
def test_a_pattern_that_matches_nothing_is_an_error_that_lists_what_there_is(stage):
    with pytest.raises(ValueError, match=r"zero.replicate: no parameter matches 'nrom/\*'.*embedding/table, layers/up"):
        whole_of(stage, zero=Zero(replicate=("nrom/*",)))


def test_a_pattern_is_matched_against_the_whole_path():
    with pytest.raises(ValueError, match="no parameter matches 'scale'"):
        whole_of(zero=Zero(replicate=("scale",)))


@pytest.mark.parametrize("stage", [-1, 4, "3", None])
def test_a_stage_that_is_not_in_the_table_is_an_error(stage):
    with pytest.raises(ValueError, match=f"stage {stage!r} is not one of 0, 1, 2, 3"):
        whole_of(stage)


@pytest.mark.parametrize("axes", [("tp",), ("dp", "pp"), "dp"])
def test_zero_shards_over_data_parallel_axes_alone(axes):
    with pytest.raises(ValueError, match="is no data-parallel axis"):
        Zero(axes=axes)


def test_one_pattern_must_still_be_a_tuple():
    with pytest.raises(TypeError, match=r"a tuple of patterns, got the string 'norm/\*'"):
        Zero(replicate="norm/*")


# ---- annotations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "shape", "mesh", "spec"),
    [
        ((), (), DP4_TP2, P()),
        ((), (3, 4), DP4_TP2, P(None, None)),
        (("tp",), (4, 3), DP4_TP2, P("tp", None)),
        ((None, "tp"), (3, 4), DP4_TP2, P(None, "tp")),
        ((None, ("tp",)), (3, 4), DP4_TP2, P(None, "tp")),
        ((None, "tp"), (3, 5), mesh_of(dp=8), P(None, None)),  # an axis of size 1 asks for nothing
        ((None, "tp"), (3, 0), DP4_TP2, P(None, "tp")),
    ],
)
def test_an_annotation_becomes_one_entry_per_dim(names, shape, mesh, spec):
    assert tp_spec(names, shape, ("w",), mesh) == spec


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("tp", None, None), r"annotated with 3 axes .*one per dim at most"),
        ((None, "dp"), r"the data-parallel axis 'dp': the stage decides"),
        ((("node", "tp"), None), r"the data-parallel axis 'node'"),
        (("mlp", None), r"'mlp', which is no axis of the mesh .*logical_axis_rules"),
        (("tp", None), r"dim 0 of size 3 is not a multiple of tp=2"),
        ((None, ("tp", "tp")), r"'tp' is named twice"),
        ((("tp",), "tp"), r"'tp' is named twice"),
    ],
)
def test_an_annotation_that_cannot_be_is_an_error_that_names_the_leaf(names, message):
    with pytest.raises(ValueError, match=rf"parameter 'blocks/0/kernel' of shape \(3, 8\).*{message}"):
        tp_spec(names, (3, 8), ("blocks", 0, "kernel"), DP4_TP2)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "spec", "expected"),
    [
        ((64, 256), "float32", P(None, None), 64 * 256 * 4),
        ((64, 256), "float32", P(Z, "tp"), 64 * 256 * 4 // 8),
        ((64, 256), "bfloat16", P("dp", None), 64 * 256 * 2 // 2),
        ((), "float32", P(), 4),
        ((0, 8), "float32", P(None, "dp"), 0),
    ],
)
def test_bytes_of_a_shard_are_what_its_spec_says(shape, dtype, spec, expected):
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(HYBRID, spec))
    assert shard_bytes(x) == expected
    assert shard_bytes(x, dtype=jnp.dtype("int8")) == math.prod(x.sharding.shard_shape(shape))


@pytest.mark.parametrize("mesh", [DP8, DP4_TP2, HYBRID, mesh_of(node=64, dp=8, tp=8)], ids=str)
@pytest.mark.parametrize("axes", [("node", "dp"), ("dp",)])
def test_a_sharded_leaf_takes_its_size_over_all_axes_that_divide_it(mesh, axes):
    leaf = leaf_of(12, 1024, 4096, tp=2, layers=1)
    got, _ = laid_out(leaf, mesh, zero=Zero(axes=axes))
    shards = math.prod(mesh.shape[axis] for axis in (*axes, "tp"))
    assert (
        shard_bytes(jax.ShapeDtypeStruct(leaf.shape, "float32"), NamedSharding(mesh, got.params))
        == 12 * 1024 * 4096 * F32 // shards
    )


# ---- optimizer state, by hand; test_optim.py asks every optimizer there is -------------------------------------------

PLACES = {
    ("scale",): ((16,), P("dp")),
    ("norm", "scale"): ((16,), P(None)),
    ("kernel",): ((3, 16, 32), P(None, "dp", "tp")),
}


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        (("mu", "kernel"), (3, 16, 32), P(None, "dp", "tp")),
        (("mu", "norm", "scale"), (16,), P(None)),  # the longest path wins
        (("mu", "scale"), (16,), P("dp")),
        (("rows", "kernel"), (3, 16), P(None, "dp")),
        (("columns", "kernel"), (3, 32), P(None, "tp")),
        (("memory", "kernel"), (10, 3, 16, 32), P(None, None, "dp", "tp")),
        (("memory", "scale"), (10, 16), P(None, "dp")),
        (("placeholder", "kernel"), (1,), P()),
        (("count", "kernel"), (), P()),
        (("projection", "kernel"), (32, 16), P()),
        (("count",), (), P()),
        (("scales",), (16,), P()),  # a name is matched whole
    ],
)
def test_state_of_a_parameter_is_placed_by_path_and_shape(path, shape, spec):
    state = unflatten_dict({path: jax.ShapeDtypeStruct(shape, "float32")})
    counter, got = opt_state_specs((jax.ShapeDtypeStruct((), "int32"), state), PLACES)
    assert flatten_dict(got) == {path: spec}
    assert counter == P()


@pytest.mark.parametrize(
    ("axes", "mesh", "words"),
    [
        (("dp",), {"node": 8, "dp": 1}, "would shard over one device"),
        (("node",), {"node": 1, "dp": 8}, "would shard over one device"),
    ],
)
def test_a_stage_that_would_shard_nothing_is_refused(axes, mesh, words):
    with pytest.raises(ShardingError, match=words):
        layouts([leaf_of(64, 64)], 3, Zero(axes=axes), mesh_of(**mesh), "float32", "float32")
    assert layouts([leaf_of(64, 64)], 0, Zero(axes=axes), mesh_of(**mesh), "float32", "float32")[1] == ()


def test_no_axes_are_refused():
    with pytest.raises(ValueError, match=r"zero\.axes is empty"):
        Zero(axes=())
