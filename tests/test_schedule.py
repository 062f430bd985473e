"""The simulated course of a scheduled program: texts whose times can be worked out by hand, and real programs."""

import functools
import itertools
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, Mesh
from tiny_decoder import SEQ, decoder

import jzero
from jzero import hlo, targets
from jzero.gpus import GPUS
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss
from jzero.rates import Link, Rates
from jzero.saved import saved
from jzero.schedule import Schedule, schedule

# A product of 1000 x 1000 x 500 takes 1 ms, as does a gather that sends 10^6 bytes; memory and starts cost nothing.
UNIT = 1e-3
RATES = Rates(
    "test", 1e12, 1e30, {"dp": Link("NVLink", 1, 4, 1e9, 0.0, 0.0)}, 1.0, 1.0, 1.0, wide_matmuls=1.0, kernel_s=0.0
)
GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}"
GATHER = f"(f32[83334]{{0}}, f32[333336]{{0}}) all-gather-start(%shard), {GROUPS}, dimensions={{0}}"


@pytest.fixture
def mesh() -> Mesh:
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    return Mesh(np.array(jax.devices()[:4]), ("dp",), axis_types=(AxisType.Auto,))


def dot(name: str, of: str = "x") -> str:
    """One millisecond."""
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"  %{name} = f32[1000,1000]{{1,0}} dot(%{of}, %w), {dims}"


def gather(name: str) -> str:
    """One millisecond."""
    return f"  %{name} = {GATHER}"


def done(name: str) -> str:
    return f"  %{name}.done = f32[333336]{{0}} all-gather-done(%{name})"


INPUTS = """  %x = f32[1000,500]{1,0} parameter(0)
  %w = f32[500,1000]{1,0} parameter(1)
  %shard = f32[83334]{0} parameter(2)"""


def module(*lines: str, computations: str = "") -> str:
    body = "\n".join([INPUTS, *lines, "  ROOT %out = () tuple()"])
    head = f"HloModule m, is_scheduled=true, num_partitions=4\n{computations}"
    return f"{head}\nENTRY %main (x: f32[2]) -> () {{\n{body}\n}}\n"


def run(mesh: Mesh, *lines: str, computations: str = "") -> Schedule:
    return schedule(module(*lines, computations=computations), mesh, RATES)


def ms(seconds: float) -> float:
    return round(seconds / UNIT, 2)


# ---- two streams -----------------------------------------------------------------------------------------------------


def test_a_gather_under_a_matmul_of_its_length_is_hidden(mesh):
    found = run(mesh, gather("g"), dot("a"), done("g"), dot("b"))
    (g,) = found.collectives
    assert [ms(s) for s in (found.step_s, found.compute_s, found.exposed_s)] == [2, 2, 0]
    assert [ms(s) for s in (g.seconds, g.hidden_s, g.exposed_s)] == [1, 1, 0]
    assert g.matmuls == 1


def test_a_gather_longer_than_its_matmul_is_exposed_for_the_rest(mesh):
    """By count it hides under a matmul; by time half of it does not."""
    slow = replace(RATES, links={"dp": Link("network", 1, 4, 0.5e9, 0.0, 0.0)})
    found = schedule(module(gather("g"), dot("a"), done("g")), mesh, slow)
    (g,) = found.collectives
    assert g.matmuls == 1
    assert [ms(s) for s in (g.seconds, g.hidden_s, g.exposed_s, found.step_s)] == [2, 1, 1, 2]


def test_what_stands_alone_is_exposed(mesh):
    found = run(mesh, gather("g"), done("g"), dot("a"))
    assert [ms(s) for s in (found.step_s, found.exposed_s)] == [2, 1]


def test_without_a_pair_everything_is_exposed(mesh):
    found = run(mesh, dot("a"), f"  %r = f32[333336]{{0}} all-gather(%shard), {GROUPS}, dimensions={{0}}", dot("b"))
    assert [ms(s) for s in (found.step_s, found.communication_s, found.exposed_s)] == [3, 1, 1]


def test_the_link_takes_one_after_the_other_and_a_wait_is_laid_to_what_runs(mesh):
    """h is waited for from 1 to 2 ms, while g is done: the second half of the wait would be h's if it were longer."""
    found = run(mesh, gather("g"), gather("h"), dot("a"), done("h"), done("g"))
    by_name = {c.name: c for c in found.collectives}
    assert [ms(by_name["g"].exposed_s), ms(by_name["h"].exposed_s)] == [0, 1]
    found = run(mesh, gather("g"), gather("h"), done("h"), done("g"))
    assert [ms(c.exposed_s) for c in found.collectives] == [1, 1]


def test_bytes_of_memory_take_their_time(mesh):
    slow_memory = replace(RATES, memory_bytes_per_s=4e9)  # x, w and the result: 2000 us
    assert ms(schedule(module(dot("a")), mesh, slow_memory).step_s) == 2


def test_starts_of_kernels_and_the_latency_of_the_link_are_added(mesh):
    rates = replace(RATES, kernel_s=UNIT, links={"dp": Link("NVLink", 1, 4, 1e9, UNIT, 2 * UNIT)})
    assert ms(schedule(module(gather("g"), done("g"), dot("a")), mesh, rates).step_s) == 4
    reduce = f"  %r = f32[166668]{{0}} all-reduce(%shard), {GROUPS}, to_apply=%add"
    assert ms(schedule(module(reduce), mesh, rates).step_s) == 3  # it has a latency of its own


# ---- loops -----------------------------------------------------------------------------------------------------------
BODY = f"""
%body (p: f32[2]) -> f32[2] {{
{INPUTS}
{gather("g")}
{done("g")}
{dot("inner")}
  ROOT %p = f32[2] parameter(3)
}}

%cond (p: f32[2]) -> pred[] {{
  %p = f32[2] parameter(0)
  ROOT %t = pred[] constant(true)
}}
"""
LOOP = '  %loop = f32[2] while(%x), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}'


def test_a_loop_takes_its_turns(mesh):
    found = run(mesh, dot("a"), LOOP, computations=BODY)
    (g,) = found.collectives
    assert [ms(s) for s in (found.step_s, found.compute_s, g.seconds, g.exposed_s)] == [11, 6, 5, 5]
    whole, loop = found.timelines
    assert [(e.what, ms(e.start_s), ms(e.end_s)) for e in whole.events] == [("matmul", 0, 1), ("loop", 1, 11)]
    assert (loop.name, loop.turns, ms(loop.seconds)) == ("body", 5, 2)
    assert [(e.what, e.stream) for e in loop.events] == [("all-gather dp", "communication"), ("matmul", "compute")]


def test_what_is_under_way_when_a_loop_begins_keeps_the_link(mesh):
    """The first turn waits for the gather from before the loop, too; from the second on the link is free."""
    found = run(mesh, gather("before"), LOOP, done("before"), computations=BODY)
    by_name = {c.name: c for c in found.collectives}
    assert [ms(s) for s in (found.step_s, by_name["before"].exposed_s, by_name["g"].exposed_s)] == [11, 1, 5]


# ---- rates of a mesh -------------------------------------------------------------------------------------------------


def rates_of(spelled: str, count: int, target: str = "h100", **more) -> Rates:
    sizes = dict(part.split("=") for part in spelled.split(","))
    devices = np.array([jax.devices()[0]] * count).reshape([int(n) for n in sizes.values()])
    mesh = Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return Rates.of(GPUS[target], mesh, **more)


@pytest.mark.parametrize(
    ("mesh", "count", "axes", "kind", "hosts", "members", "gb_per_s"),
    [
        ("dp=8", 8, "dp", "NVLink", 1, 8, 450),
        ("node=4,dp=8", 32, "dp", "NVLink", 1, 8, 450),
        ("node=4,dp=8", 32, "node", "network", 4, 1, 50),
        ("node=4,dp=8", 32, "node+dp", "network", 4, 8, 400),
        ("dp=16", 16, "dp", "network", 2, 8, 400),
        ("dp=4,tp=8", 32, "dp", "network", 4, 1, 50),
        ("dp=4,tp=8", 32, "tp", "NVLink", 1, 8, 450),
        ("dp=8,tp=2", 16, "dp", "network", 2, 4, 200),
    ],
)
def test_groups_within_a_host_have_its_links_and_others_their_members_cards(
    mesh, count, axes, kind, hosts, members, gb_per_s
):
    link = rates_of(mesh, count).links[axes]
    assert (link.kind, link.hosts, link.members_per_host, link.bytes_per_s / 1e9) == (kind, hosts, members, gb_per_s)


def test_without_matrix_units_for_them_32_bit_products_are_those_of_the_cores():
    mesh = jzero.make_mesh("dp=1", jax.devices()[:1])
    v100 = Rates.of(GPUS["v100-16"], mesh)
    assert v100.wide_matmuls * v100.matmul_flops_per_s == pytest.approx(15.7e12, rel=0.01)  # NVIDIA's figure
    assert Rates.of(GPUS["a100"], mesh).wide_matmuls == 0.5


def test_gpus_without_nvlink_talk_over_pcie_and_without_a_card_to_no_other_host():
    assert rates_of("dp=8", 8, "l40s").links["dp"].kind == "PCIe"
    with pytest.raises(ValueError, match=r"NVIDIA L40S has no network card, .* over 2 hosts"):
        rates_of("dp=16", 16, "l40s")


def test_larger_groups_take_longer_to_begin():
    in_host, few_hosts, many_hosts = (rates_of(f"dp={n}", n).links["dp"].latency_s for n in (8, 64, 1024))
    assert in_host < few_hosts < many_hosts / 10
    assert rates_of("dp=1024", 1024).links["dp"].all_reduce_latency_s < few_hosts * 2  # a tree, not a ring


def test_every_assumption_is_said():
    said = "\n".join(rates_of("node=4,dp=8", 32, matmul_efficiency=0.55).assumptions())
    for figure in ("989 TFLOPS", "55%", "3352 GB/s", "80%", "2 us", "450 GB/s", "400 GB/s", "node+dp"):
        assert figure in said


def test_a_link_that_is_not_known_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="no link for groups along 'tp': these rates know dp"):
        RATES.collective_s("all-gather", ("tp",), 1)


# ---- real programs ---------------------------------------------------------------------------------------------------


def test_a_cpu_program_s_traffic_is_all_exposed():
    if jax.device_count() != 8:
        pytest.skip("the mesh is for 8 devices")
    batch = {"tokens": jax.ShapeDtypeStruct((16, SEQ + 1), jnp.int32)}
    step = jzero.setup(decoder(), next_token_loss, optax.adamw(1e-3), "dp=8", batch, stage=3, micro_batches=2)
    program = step.lower()["step"].compile()
    found = schedule(program, step.mesh, Rates.of(GPUS["h100"], step.mesh))
    assert found.exposed_s == pytest.approx(found.communication_s)
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_s)
    ledger = hlo.collectives(program, step.mesh)
    assert sum(c.wire_bytes for c in found.collectives) == sum(c.wire_bytes for c in ledger)
    assert sum(s.message_bytes for s in found.sums("kind")) == sum(c.total_bytes for c in ledger)


@functools.cache
def scheduled(mesh: str = "dp=8", devices: int = 8):
    """A run at stage 3 of a decoder wide enough that its matmuls take longer than its gathers, and its program."""
    config = DecoderConfig(
        width=2048, layers=6, heads=16, kv_heads=16, mlp_width=5504, vocab=4096, dtype="bfloat16", remat="full"
    )
    step = jzero.setup(
        lambda: Decoder(config, rngs=nnx.Rngs(0)),
        next_token_loss,
        optax.adamw(1e-3),
        jzero.make_mesh(mesh, targets.gpu_devices("h100", devices)),
        {"tokens": jax.ShapeDtypeStruct((devices, 4097), jnp.int32)},
        stage=3,
        precision=jzero.Precision(params="bfloat16"),
    )
    program = step.lower()["step"].compile(compiler_options=targets.COMPILER_OPTIONS)
    return step, program


def course(*args) -> Schedule:
    step, program = scheduled(*args)
    return schedule(program, step.mesh, Rates.of(GPUS["h100"], step.mesh))


needs_gpu_compiler = pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))


@needs_gpu_compiler
@pytest.mark.parametrize(("mesh", "devices"), [("dp=8", 8), ("node=8,dp=8", 64)])
def test_with_the_prefetching_stack_no_collective_of_the_steady_loops_is_exposed(mesh, devices):
    """Within a host and across hosts, by time."""
    found = course(mesh, devices)
    steady = {s.key[:2]: s for s in found.sums("phase", "kind", "layer_turns") if s.key[2]}
    assert set(steady) == {("forward", "all-gather"), ("backward", "all-gather"), ("backward", "reduce-scatter")}
    for s in steady.values():
        assert s.seconds > 0
        assert s.exposed_s <= 0.01 * s.seconds
    assert {t.phase for t in found.timelines[1:]} == {"forward", "backward"}
    assert all(
        t.turns == 2 for t in found.timelines[1:]
    )  # of two layers each; the last layer and one more stand beside


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["node=128,dp=8", "node=128,dp=4,tp=2"])
def test_across_1024_devices_each_still_has_a_matmul_over_it(mesh):
    """By time it may be longer than that: a ring of 1,024 takes its while to begin."""
    steady = [c for c in course(mesh, 1024).collectives if c.layer_turns and "tp" not in c.axes]
    assert steady
    assert not [c for c in steady if not c.matmuls]


@needs_gpu_compiler
def test_a_layer_is_one_gather():
    step, program = scheduled("node=8,dp=8", 64)
    gathers = [c for c in hlo.collectives(program, step.mesh) if c.kind == "all-gather" and c.layer_turns]
    assert len(gathers) == 4  # forward and backward, two layers in a turn of the loop
    assert {c.message_bytes for c in gathers} == {2 * (4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048)}


@needs_gpu_compiler
@pytest.mark.parametrize(("mesh", "devices"), [("dp=8", 8), ("node=8,dp=8", 64)])
def test_two_layers_are_gathered_at_once_and_three_where_the_passes_meet(mesh, devices):
    step, program = scheduled(mesh, devices)
    shapes = flatten_dict(step.abstract_state.params)
    layer = sum(2 * math.prod(x.shape[1:]) for path, x in shapes.items() if path[0] == "layers")
    assert 1.5 * layer < saved(program).gathered_bytes <= 3 * layer


@needs_gpu_compiler
def test_a_schedule_is_plain_data_and_the_same_each_time():
    first, second = course(), course()
    assert first == second
    adapter = pydantic.TypeAdapter(Schedule)
    assert adapter.validate_json(json.dumps(adapter.dump_python(first, mode="json"))) == first
    assert all(0 <= e.start_s <= e.end_s for t in first.timelines for e in t.events)
    for t in first.timelines:
        for stream in ("compute", "communication"):
            busy = [e for e in t.events if e.stream == stream]
            assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(busy))
