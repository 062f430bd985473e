"""Forward, backward and update are told apart by the names that operations carry from the traced function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jzero.hlo import Collective, collectives
from jzero.hlo_text import Module, parse_instruction
from jzero.phases import Phases, parts

STEP = "jit(step)/shard_map"


def phase_of(op_name: str, *, whiles=(), differentiated: bool = True) -> str:
    line = f'  ROOT %s = f32[16]{{0}} sine(%x), metadata={{op_name="{"f/jvp()/sin" if differentiated else "f/sin"}"}}'
    module = Module(f"HloModule m\n\nENTRY %main (x: f32[16]) -> f32[16] {{\n{line}\n}}\n")
    loops = tuple(parse_instruction("w", f'f32[] while(%x), metadata={{op_name="{name}"}}') for name in whiles)
    return Phases(module).of(parse_instruction("g", f'f32[] add(%x), metadata={{op_name="{op_name}"}}'), loops)


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        (f"{STEP}/jvp()/all_gather", "forward"),
        (f"{STEP}/while/body/closed_call/jvp(jit(silu))/mul", "forward"),
        (f"{STEP}/transpose(jvp())/shard_map/reduce_scatter", "backward"),
        (f"{STEP}/transpose(jvp(transpose(jvp(jvp()))))/checkpoint/rematted_computation/dot_general", "backward"),
        (f"{STEP}/reduce_scatter", "update"),
        (f"{STEP}/my_transpose(x)/not.jvp(x)/transpose", "update"),
        ("", "update"),
        # XLA joins names: what most of them say, and the earlier where they are equally many.
        (f"{STEP}/(jvp()/all_gather:transpose(jvp())/all_gather:transpose(jvp())/a)", "backward"),
        (f"{STEP}/(transpose(jvp())/dot_general:jvp()/vmap(a:b)/dot_general)", "forward"),
        (f"(jvp()/a:{STEP}/b:{STEP}/c)", "update"),
        (f"{STEP}/(transpose(jvp())/a:transpose(jvp())/b:jvp()/cut off in the mid", "backward"),
    ],
)
def test_a_name_tells_the_phase(op_name, phase):
    assert phase_of(op_name) == phase


def test_what_lost_its_name_is_of_the_phase_of_its_loop():
    microbatches, layers = f"{STEP}/while", f"{STEP}/while/body/transpose(jvp())/while"
    assert phase_of("", whiles=(microbatches, layers)) == "backward"
    assert phase_of(f"{STEP}/add", whiles=(microbatches, layers)) == "backward"
    assert phase_of("", whiles=(microbatches,)) == "update"


@pytest.mark.parametrize(
    ("names", "phase"),
    [
        (["jvp()/sin", ""], "forward"),
        (["transpose(jvp())/mul"], "backward"),
        (["jvp()/a", "transpose(jvp())/b"], "update"),  # microbatches
        (["add"], "update"),
    ],
)
def test_a_loop_that_lost_its_name_is_of_the_phase_of_what_is_in_it(names, phase):
    lines = [f'  %i{n} = f32[] sine(%p), metadata={{op_name="{name}"}}' for n, name in enumerate(names)]
    body = "\n".join(["%body (p: f32[]) -> f32[] {", "  %p = f32[] parameter(0)", *lines, "}"])
    entry = 'ENTRY %main (x: f32[]) -> f32[] {\n  ROOT %s = f32[] sine(%x), metadata={op_name="jvp()/sin"}\n}'
    loop = parse_instruction("w", "f32[] while(%x), condition=%cond, body=%body")
    phases = Phases(Module(f"HloModule m\n\n{body}\n\n{entry}\n"))
    assert phases.of(loop) == phase
    assert phases.layer_loop((loop,)) == (None if phase == "update" else loop)


def test_a_program_without_derivatives_is_forward():
    assert phase_of(f"{STEP}/dot_general", differentiated=False) == "forward"


def test_joined_names_come_apart():
    assert parts("p/q/(a(x:y)/b:c)") == ["p/q/a(x:y)/b", "p/q/c"]
    assert parts("(a/b:c)") == ["a/b", "c"]
    assert parts("p/jvp(a)/b") == ["p/jvp(a)/b"]


LAYERS, MICRO, D = 5, 3, 8


def test_of_any_step_each_collective_knows_its_phase_and_its_layer_loop():
    """Gather in each layer forward, its transpose backward, once per microbatch; one sum of what came out."""
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = Mesh(np.array(jax.devices()[:4]), ("dp",), axis_types=(AxisType.Auto,))

    def loss(shards, x):
        def layer(x, shard):
            return jnp.sin(x @ lax.all_gather(shard, "dp", axis=0, tiled=True)), None

        return lax.scan(layer, x, shards)[0].sum()

    def step(shards, xs):
        def micro(total, x):
            return total + jax.grad(loss)(shards, x), None

        grads, _ = lax.scan(micro, jnp.zeros_like(shards), xs)
        return grads, lax.psum((grads**2).sum(), "dp")

    f = jax.shard_map(step, mesh=mesh, in_specs=(P(None, "dp"), P()), out_specs=(P(None, "dp"), P()), check_vma=False)
    args = jax.ShapeDtypeStruct((LAYERS, D, D), jnp.float32), jax.ShapeDtypeStruct((MICRO, 2, D), jnp.float32)
    found: list[Collective] = collectives(jax.jit(f).lower(*args).compile(), mesh)
    assert {(c.kind, c.phase, c.layer_turns, c.trips) for c in found} == {
        ("all-gather", "forward", LAYERS, LAYERS * MICRO),
        ("reduce-scatter", "backward", LAYERS, LAYERS * MICRO),
        ("all-reduce", "update", 0, 1),
    }
