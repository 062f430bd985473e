"""Each move between two layouts sends what it says, and nothing that it does not say."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jzero
from jzero import hlo
from jzero.collectives import AllReduce, Cast, Gather, Identity, Scatter, Then, over_data
from jzero.zero import data_part

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")

WHOLE = P(None, "tp")
Z = ("dp", "node")
SHARD = P(Z, "tp")
ELEMENTS = 32 * 16 // 2  # of one tp slice


@pytest.mark.parametrize(
    ("move", "start", "end", "kind"),
    [
        (Identity(), WHOLE, WHOLE, None),
        (Cast("float32"), WHOLE, WHOLE, None),
        (Gather(0, Z, WHOLE), SHARD, WHOLE, "all-gather"),
        (Scatter(0, Z, WHOLE, "float32"), WHOLE, SHARD, "reduce-scatter"),
        (AllReduce(Z, WHOLE, "float32"), WHOLE, WHOLE, "all-reduce"),
        (AllReduce(("node",), WHOLE, "float32", parts=2), P("dp", "tp"), P("dp", "tp"), "all-reduce"),
        (Then(Cast("float32"), Scatter(0, Z, WHOLE, "float32")), WHOLE, SHARD, "reduce-scatter"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "moves") else None,
)
def test_the_program_sends_the_message_bytes_and_leaves_tp_alone(move, start, end, kind):
    mesh = jzero.make_mesh("node=2,dp=2,tp=2")
    manual = over_data(move, mesh, data_part(start), data_part(end))
    placed = [jax.sharding.NamedSharding(mesh, spec) for spec in (start, end)]
    with jax.set_mesh(mesh):
        program = (
            jax.jit(manual, in_shardings=placed[0], out_shardings=placed[1])
            .lower(jax.ShapeDtypeStruct((32, 16), jnp.float32))
            .compile()
        )
    ledger = hlo.collectives(program, mesh)

    assert move.moves == (kind is not None)
    assert sum(c.message_bytes for c in ledger) == move.message_bytes(ELEMENTS, 4)
    assert {c.kind for c in ledger} == ({kind} if kind else set())
    assert all("tp" not in c.axes for c in ledger)


def test_what_is_cast_before_it_is_sent_is_counted_as_sent():
    assert Gather(0, Z, WHOLE).message_bytes(100, 2) == 200
    assert Scatter(0, Z, WHOLE, "float32").message_bytes(100, 2) == 400
    assert AllReduce(("node",), WHOLE, "bfloat16", parts=4).message_bytes(100, 4) == 50
    assert (
        Then(Scatter(0, ("dp",), WHOLE, "float32"), AllReduce(("node",), WHOLE, "float32", 2)).message_bytes(100, 2)
        == 600
    )


def test_shards_over_two_axes_come_back_in_order():
    mesh = jzero.make_mesh("node=2,dp=2,tp=2")
    x = jnp.arange(32.0 * 16).reshape(32, 16)
    there = over_data(Scatter(0, Z, WHOLE, "float32"), mesh, P(), P(Z))
    back = over_data(Gather(0, Z, WHOLE), mesh, P(Z), P())
    with jax.set_mesh(mesh):
        assert (jax.jit(lambda x: back(there(x)))(x) == 4 * x).all()
