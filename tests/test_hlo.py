"""What `jzero.hlo` reads from a program equals arithmetic, byte for byte; what it cannot read is an error."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.hlo import Collective, HloError, collectives, memory, traffic
from jzero.targets import COMPILER_OPTIONS, available, gpu_devices

F32 = 4  # bytes


def mesh_of(shape: dict[str, int], devices=None) -> Mesh:
    devices = np.array(jax.devices()) if devices is None else devices
    count = int(np.prod(list(shape.values())))
    if devices.size < count:
        pytest.skip(f"needs {count} devices, here are {devices.size}")
    grid = devices[:count].reshape(*shape.values())
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


@pytest.fixture
def cube() -> Mesh:
    return mesh_of({"node": 2, "dp": 2, "tp": 2})


def compiled_for(mesh: Mesh, f: Callable, in_specs, out_specs, *args, options=None):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(*args).compile(compiler_options=options)


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# ---- programs --------------------------------------------------------------------------------------------------------
LAYERS, MICRO, D, ROWS = 5, 3, 64, 32


def layers_in_microbatches(weights, x):
    """Three microbatches over five layers: gather, matmul, sum over tp in each layer; a scatter in each microbatch."""

    def layer(x, shard):
        full = lax.all_gather(shard, ("node", "dp"), axis=0, tiled=True)  # D × D
        return lax.psum(jnp.tanh(x @ full), "tp"), None

    def microbatch(x, _):
        x, _ = lax.scan(layer, x, weights)
        part = lax.psum_scatter(x, "dp", scatter_dimension=0, tiled=True)
        return jnp.concatenate([part, part]), None

    return lax.scan(microbatch, x, None, length=MICRO)[0]


def compile_layers(mesh: Mesh, dtype, options=None):
    specs = (P(None, ("node", "dp")), P(("node", "dp")))
    args = array(LAYERS, D, D, dtype=dtype), array(ROWS, D, dtype=dtype)
    return compiled_for(mesh, layers_in_microbatches, specs, P(("node", "dp")), *args, options=options)


def expected_layers(dtype: str, size: int) -> dict[tuple, int]:
    rows = ROWS // 4
    return {
        ("all-gather", ("node", "dp"), dtype): MICRO * LAYERS * D * D * size,
        ("all-reduce", ("tp",), dtype): MICRO * LAYERS * rows * D * size,
        ("reduce-scatter", ("dp",), dtype): MICRO * rows * D * size,
    }


def test_traffic_of_nested_scans_is_messages_times_both_trip_counts(cube):
    assert traffic(collectives(compile_layers(cube, jnp.float32), cube)) == expected_layers("f32", F32)


def test_each_collective_knows_its_loops_its_message_and_its_place_in_the_source(cube):
    found = {c.kind: c for c in collectives(compile_layers(cube, jnp.float32), cube)}
    gather, scatter = found["all-gather"], found["reduce-scatter"]
    assert (gather.message_bytes, gather.trips, gather.group_size) == (D * D * F32, MICRO * LAYERS, 4)
    assert (scatter.message_bytes, scatter.trips, scatter.group_size) == (ROWS // 4 * D * F32, MICRO, 2)
    assert len(gather.loops) == 2
    assert gather.loops[:1] == scatter.loops
    assert gather.op_name.endswith("/all_gather")


@pytest.mark.skipif(bool(available()), reason=str(available()))
@pytest.mark.parametrize(("dtype", "name", "size"), [(jnp.bfloat16, "bf16", 2), (jnp.float32, "f32", 4)])
def test_compiled_for_absent_gpus_the_same_program_sends_the_declared_dtype(dtype, name, size):
    mesh = mesh_of({"node": 2, "dp": 2, "tp": 2}, gpu_devices("h100", 8))
    compiled = compile_layers(mesh, dtype, COMPILER_OPTIONS)
    assert "all-gather-start" in compiled.as_text()  # asynchronous pairs, each counted once
    assert traffic(collectives(compiled, mesh)) == expected_layers(name, size)


def test_all_reduces_that_xla_combined_keep_the_sum_of_their_bytes(cube):
    def f(x, y):
        return lax.psum((x, y), ("dp", "tp"))

    compiled = compiled_for(cube, f, P(), P(), array(16, 8), array(24))
    assert traffic(collectives(compiled, cube)) == {("all-reduce", ("dp", "tp"), "f32"): (16 * 8 + 24) * F32}


def test_all_to_all_and_permute_count_one_device_s_tensor(cube):
    def f(x):
        x = lax.all_to_all(x, "node", split_axis=0, concat_axis=0, tiled=True)
        return lax.ppermute(x, "dp", [(0, 1), (1, 0)])

    compiled = compiled_for(cube, f, P("node"), P("node"), array(64, 8))
    local = 64 // 2 * 8 * F32
    assert traffic(collectives(compiled, cube), by=("kind", "axes", "group_size")) == {
        ("all-to-all", ("node",), 2): local,
        ("collective-permute", ("dp",), 2): local,
    }


def test_the_group_of_a_permute_is_everything_along_its_axes():
    mesh = mesh_of({"dp": 4, "tp": 2})
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    compiled = compiled_for(mesh, lambda x: lax.ppermute(x, "dp", ring), P("dp"), P("dp"), array(64))
    (found,) = collectives(compiled, mesh)
    assert (found.axes, found.group_size, found.wire_bytes) == (("dp",), 4, 64 // 4 * F32)


def test_a_sum_that_the_partitioner_puts_in_is_found_on_its_axis(cube):
    def place(*spec):
        return NamedSharding(cube, P(*spec))

    f = jax.jit(jnp.dot, in_shardings=(place("dp", "tp"), place("tp", None)), out_shardings=place("dp", None))
    compiled = f.lower(array(32, 16), array(16, 24)).compile()
    assert traffic(collectives(compiled, cube)) == {("all-reduce", ("tp",), "f32"): 32 // 2 * 24 * F32}


def test_axes_are_mesh_positions_whatever_the_device_ids():
    mesh = mesh_of({"a": 4, "b": 2}, np.array(jax.devices()[:8])[::-1])
    compiled = compiled_for(mesh, lambda x: lax.psum(x, "b"), P("a"), P("a"), array(16))
    assert traffic(collectives(compiled, mesh)) == {("all-reduce", ("b",), "f32"): 4 * F32}


def test_groups_of_one_device_send_nothing_and_are_left_out():
    mesh = mesh_of({"dp": 8, "tp": 1})
    compiled = compiled_for(mesh, lambda x: lax.psum(lax.psum(x, "tp"), "dp"), P(), P(), array(16))
    assert traffic(collectives(compiled, mesh), by=("axes",)) == {(("dp",),): 16 * F32}


def test_a_program_without_collectives_is_empty(cube):
    assert collectives(jax.jit(jnp.sin).lower(array(16)).compile(), cube) == []


def test_every_branch_of_a_conditional_counts(cube):
    def f(x):
        return lax.cond(x.sum() > 0, lambda x: lax.psum(x, "dp"), lambda x: lax.psum(2 * x, "tp"), x)

    found = collectives(compiled_for(cube, f, P(), P(), array(16)), cube)
    assert {c.axes: c.total_bytes for c in found} == {("dp",): 16 * F32, ("tp",): 16 * F32}


def loop_of_unknown_length(cube, before, inside):
    def f(x, n):
        return lax.fori_loop(0, n, lambda _, x: inside(jnp.sin(x)), before(x))

    return compiled_for(cube, f, (P(), P()), P(), array(16), array(dtype=jnp.int32))


def test_a_collective_in_a_loop_of_unknown_length_is_an_error_that_names_the_loop(cube):
    compiled = loop_of_unknown_length(cube, lambda x: x, lambda x: lax.psum(x, "dp"))
    with pytest.raises(HloError, match=r"loop while[.\d]* has no known trip count"):
        collectives(compiled, cube)


def test_a_loop_of_unknown_length_without_collectives_is_none_of_our_business(cube):
    compiled = loop_of_unknown_length(cube, lambda x: lax.psum(x, "dp"), lambda x: x)
    assert traffic(collectives(compiled, cube), by=("axes",)) == {(("dp",),): 16 * F32}


def test_a_mesh_in_another_device_order_is_refused(cube):
    other = mesh_of({"node": 2, "dp": 2, "tp": 2}, np.array(jax.devices()[:8])[::-1])
    with pytest.raises(HloError, match="in that order"):
        collectives(compile_layers(cube, jnp.float32), other)


def test_memory_is_the_program_s_own_account_per_device(cube):
    place = NamedSharding(cube, P("dp"))
    f = jax.jit(lambda x: jnp.flip(jnp.sort(x), 1), in_shardings=place, out_shardings=place, donate_argnums=0)
    m = memory(f.lower(array(1024, 16)).compile())
    local = 1024 // 2 * 16 * F32
    assert (m.argument_bytes, m.output_bytes, m.alias_bytes) == (local, local, local)
    assert m.temp_bytes >= local  # the sorted copy
    assert m.peak_bytes == local + m.temp_bytes


# ---- texts: what XLA prints on other versions and backends -----------------------------------------------------------
def module(body: str, computations: str = "", devices: int = 8) -> str:
    return f"""HloModule jit_f, is_scheduled=true, num_partitions={devices}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{computations}
ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
{body}
}}
"""


def gather_over(groups: str) -> str:
    return module(
        f"  ROOT %g = f32[32]{{0}} all-gather(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}, "
        'use_global_device_ids=true, metadata={op_name="jit(f)/all_gather"}'
    )


def test_groups_become_mesh_axes(cube):
    (found,) = collectives(gather_over("[4,2]<=[2,2,2]T(0,2,1)"), cube)
    assert (found.axes, found.group_size, found.message_bytes) == (("dp",), 2, 32 * F32)
    assert (found.name, found.op_name) == ("g", "jit(f)/all_gather")


def test_replica_groups_that_cannot_be_read_are_an_error_that_names_the_instruction(cube):
    with pytest.raises(HloError, match=r"instruction g: .*replica groups '<<0,1>,<2,3>>"):
        collectives(gather_over("<<0,1>,<2,3>>"), cube)


@pytest.mark.parametrize("shape", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 1}])
def test_a_mesh_of_another_size_is_an_error(shape):
    mesh = mesh_of(shape)
    with pytest.raises(HloError, match=f"do not part {mesh.size} devices"):
        collectives(gather_over("[4,2]<=[8]"), mesh)
    permute = module("  ROOT %g = f32[16]{0} collective-permute(%x), source_target_pairs={{0,7},{7,0}}")
    with pytest.raises(HloError, match=f"reaches device 7, the mesh has {mesh.size}"):
        collectives(permute, mesh)


GROUPS = "channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}"
WRAPPED = f"""
%wrapped (p: f32[16]) -> f32[8] {{
  %p = f32[16]{{0}} parameter(0)
  ROOT %rs = f32[8]{{0}} reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%add
}}
"""


@pytest.mark.parametrize(
    ("lines", "kind", "by_dtype"),
    [
        (
            [f"%s = (f32[16]{{0}}, f32[32]{{0}}) all-gather-start(%x), {GROUPS}, dimensions={{0}}",
             "%d = f32[32]{0} all-gather-done(%s)"],
            "all-gather", {"f32": 128},
        ),
        (
            [("%s = ((f32[16]{0}, bf16[3]{0}, f32[1]{0}), (f32[32]{0}, bf16[6]{0}, /*index=2*/f32[2]{0})) "
             f"all-gather-start(%x, %y, %z), {GROUPS}, dimensions={{0}}"),
             "%d = (f32[32]{0}, bf16[6]{0}, f32[2]{0}) all-gather-done(%s)"],
            "all-gather", {"f32": 136, "bf16": 12},
        ),
        (
            [f"%s = ((f32[16]{{0}}), f32[8]{{0}}) reduce-scatter-start(%x), {GROUPS}, dimensions={{0}}, to_apply=%add",
             "%d = f32[8]{0} reduce-scatter-done(%s)"],
            "reduce-scatter", {"f32": 64},
        ),
        (
            ["%s = ((f32[16]{0}), f32[8]{0}, u32[]{:S(2)}) async-start(%x), calls=%wrapped",
             "%u = ((f32[16]{0}), f32[8]{0}, u32[]{:S(2)}) async-update(%s), calls=%wrapped",
             "%d = f32[8]{0} async-done(%u), calls=%wrapped"],
            "reduce-scatter", {"f32": 64},
        ),
        (
            [f"%s = f32[16]{{0}} all-reduce-start(%x), {GROUPS}, to_apply=%add",
             "%d = f32[16]{0} all-reduce-done(%s)"],
            "all-reduce", {"f32": 64},
        ),
        (
            [f"%s = (f32[16]{{0}}, f16[5,7]{{1,0:T(8,128)(2,1)}}) all-reduce-start(%x, %y), {GROUPS}, to_apply=%add",
             "%d = (f32[16]{0}, f16[5,7]{1,0}) all-reduce-done(%s)"],
            "all-reduce", {"f32": 64, "f16": 70},
        ),
        (
            [f"%s = ((s8[16]{{0}}), s8[16]{{0}}) all-to-all-start(%x), {GROUPS}, dimensions={{0}}",
             "%d = s8[16]{0} all-to-all-done(%s)"],
            "all-to-all", {"s8": 16},
        ),
        (
            [f"%d = (f32[8]{{0}}, f32[8]{{0}}) all-to-all(%x, %y), {GROUPS}"],
            "all-to-all", {"f32": 64},
        ),
        (
            [("%s = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=1, "
             "source_target_pairs={{0,2},{2,0}}"),
             "%d = f32[16]{0} collective-permute-done(%s)"],
            "collective-permute", {"f32": 64},
        ),
        (
            [f"%d = s4[15]{{0:E(4)}} all-reduce(%x), {GROUPS}, to_apply=%add"],
            "all-reduce", {"s4": 8},  # packed, as the layout says
        ),
        (
            [f"%d = (s4[15]{{0}}, pred[3]{{0}}, f8e4m3fn[5]{{0}}) all-reduce(%x, %y, %z), {GROUPS}, to_apply=%add"],
            "all-reduce", {"s4": 15, "pred": 3, "f8e4m3fn": 5},
        ),
        (
            [f"%s = ((f32[16]{{0}}), f32[16]{{0}}) all-reduce-start(%x), {GROUPS}, to_apply=%add",
             "%d = f32[16]{0} all-reduce-done(%s)"],
            "all-reduce", {"f32": 64},
        ),
        (
            ["%d = f32[8]{0} call(%x), to_apply=%wrapped"], "reduce-scatter", {"f32": 64},
        ),
        (
            ["%d = f32[8]{0} fusion(%x), kind=kCustom, calls=%wrapped"], "reduce-scatter", {"f32": 64},
        ),
    ],
)  # fmt: skip
def test_combined_and_asynchronous_forms_count_once_with_the_right_shapes(cube, lines, kind, by_dtype):
    called = WRAPPED if any("%wrapped" in line for line in lines) else ""
    found = collectives(module("\n".join("  " + line for line in lines), called), cube)
    assert {c.dtype: c.message_bytes for c in found} == by_dtype
    assert {(c.kind, c.axes, c.trips) for c in found} == {(kind, ("dp",), 1)}
    assert len(found) == len(by_dtype)


def while_loop(trips: str) -> str:
    computations = f"""
%body (p: f32[16]) -> f32[16] {{
  %p = f32[16]{{0}} parameter(0)
  ROOT %r = f32[16]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add
}}

%cond (p: f32[16]) -> pred[] {{
  %p = f32[16]{{0}} parameter(0)
  %q = f32[16]{{0}} all-gather(%p), {GROUPS}, dimensions={{0}}
  ROOT %t = pred[] custom-call(%q), custom_call_target="small"
}}
"""
    return module(f"  ROOT %w = f32[16]{{0}} while(%x), condition=%cond, body=%body{trips}", computations)


def test_a_loop_s_body_runs_its_trip_count_and_its_condition_once_more(cube):
    text = while_loop(', backend_config={"known_trip_count":{"n":"7"}}')
    assert {c.kind: (c.trips, c.loops) for c in collectives(text, cube)} == {
        "all-reduce": (7, ("body",)),
        "all-gather": (8, ("cond",)),
    }


def test_what_looks_like_a_call_in_free_text_is_none(cube):
    sine = '  %d = f32[16]{0} sine(%x), metadata={op_name="f, calls=%wrapped"}'
    call = "  ROOT %r = f32[8]{0} call(%d), to_apply=%wrapped"
    assert len(collectives(module(f"{sine}\n{call}", WRAPPED), cube)) == 1


def test_a_loop_without_a_trip_count_is_named(cube):
    with pytest.raises(HloError, match="loop w has no known trip count"):
        collectives(while_loop(""), cube)


@pytest.mark.parametrize("opcode", ["ragged-all-to-all", "collective-broadcast", "all-gather-of-next-year", "send"])
def test_a_collective_without_a_rule_is_an_error(cube, opcode):
    with pytest.raises(HloError, match=f"no rule for counting the bytes of '{opcode}'"):
        collectives(module(f"  ROOT %g = f32[16]{{0}} {opcode}(%x), {GROUPS}"), cube)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the HLO text"),
        ("module @jit_f attributes {mhlo.num_partitions = 8 : i32} {}", "not the HLO text"),
        (module("  ROOT %g = f32[16]{0} sin(%x)", WRAPPED), r"\['rs'\] stand in no computation"),
        (module("  ROOT %g = f32[16]{0} <new syntax>"), "instruction g: cannot tell shape and operation apart"),
        (module(f"  ROOT %g = q9[16]{{0}} all-reduce(%x), {GROUPS}"), "dtype 'q9'"),
        (module("  ROOT %g = f32[16]{0} collective-permute(%x), channel_id=1"), "source_target_pairs"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_never_an_empty_list(cube, text, message):
    with pytest.raises(HloError, match=message):
        collectives(text, cube)


# ---- arithmetic ------------------------------------------------------------------------------------------------------
def collective(kind: str, message: int = 120, group: int = 4, trips: int = 3, axes=("dp",)) -> Collective:
    return Collective("n", kind, axes, group, "f32", message, trips, (), "")


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        ("all-gather", 270),
        ("reduce-scatter", 270),
        ("all-to-all", 270),
        ("all-reduce", 540),
        ("collective-permute", 360),
    ],
)
def test_wire_bytes_are_what_one_device_sends_with_a_ring(kind, wire):
    c = collective(kind)
    assert (c.total_bytes, c.wire_bytes) == (360, wire)


def test_traffic_sums_messages_by_the_named_fields():
    found = [collective("all-gather"), collective("all-gather", trips=1), collective("all-reduce", axes=("tp",))]
    assert traffic(found, by=("kind",)) == {("all-gather",): 480, ("all-reduce",): 360}
    assert traffic(found, by=()) == {(): 840}
    with pytest.raises(ValueError, match=r"traffic by \['axis'\]: a collective has the fields"):
        traffic(found, by=("axis",))
