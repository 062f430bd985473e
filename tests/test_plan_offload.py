"""A plan of a run that keeps part of its state outside of the device: where it rests, and when a device holds most."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pydantic
import pytest
from tiny_decoder import SEQ, VOCAB, decoder

import jzero
import jzero.plan
from jzero import gpus, hlo, targets
from jzero.models.decoder import next_token_loss
from jzero.plan import moments
from jzero.plan.estimate import Estimate
from jzero.plan.offloading import Moved, Offloading, slowed
from jzero.plan.programs import programs_of

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")

needs_compiler = pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))

GROUP = 30_000  # three groups of gradients and the optimizer's state


@functools.cache
def run_of(stage=3, absent=False, **where):
    mesh = jzero.make_mesh("dp=8", targets.gpu_devices("h100", 8) if absent else jax.devices())
    batch = {"tokens": jax.ShapeDtypeStruct((16, SEQ + 1), jnp.int32)}
    offload = jzero.Offload(group_size=GROUP, min_param_bytes=0, **where)
    model = decoder(layers=4, layers_ahead=1, remat="full")
    return jzero.setup(
        model, next_token_loss, optax.adamw(1e-3), mesh, batch, stage=stage, micro_batches=2, offload=offload
    )


def stream_of(**where):
    stream = run_of(**where).stream
    assert stream is not None
    return stream


@functools.cache
def plan_of(stage=3, **where):
    return jzero.plan.of(run_of(stage, **where))


@pytest.mark.parametrize(
    ("where", "tiers"),
    [
        ({"optimizer": "host"}, {"host": ("m", "v")}),
        ({"optimizer": "host", "params": "host"}, {"host": ("parameters", "m", "v")}),
        ({"optimizer": "nvme", "dir": ("anywhere",)}, {"nvme": ("m", "v")}),
        ({"optimizer": "host", "params": "nvme", "dir": ("anywhere",)}, {"nvme": ("parameters",), "host": ("m", "v")}),
        ({"optimizer": "host", "update": "cpu"}, {"host": ("m", "v")}),
    ],
)
def test_what_rests_elsewhere_is_not_on_the_device(where, tiers):
    everything, memory = plan_of().memory, plan_of(**where).memory
    assert memory.states_bytes == everything.states_bytes
    for tier, classes in tiers.items():
        assert memory.tiers[tier] == sum(everything.bytes_of(name) for name in classes)
        assert {part.name for part in memory.parts if part.elsewhere.get(tier)} == set(classes)
    assert memory.at_rest_bytes == everything.at_rest_bytes - sum(memory.tiers[tier] for tier in tiers)
    assert memory.tiers["device"] == memory.at_rest_bytes
    assert memory.host_bytes_per_machine == 8 * memory.tiers["host"]
    assert memory.nvme_bytes_per_machine == 8 * memory.tiers.get("nvme", 0)


def test_the_peak_is_the_largest_of_all_programs_with_what_lies_beside_them():
    run, memory = run_of(optimizer="host"), plan_of(optimizer="host").memory
    programs = programs_of(run, None)
    found = list(moments.moments(run, stream_of(optimizer="host"), programs))
    assert [moment.program for moment in found] == ["gradients", *(x for x in programs.compiled if "update" in x)]
    assert memory.peak_bytes == max(moment.peak_bytes for moment in found)
    assert memory.peak_program == "gradients"
    first = hlo.memory(programs.compiled["gradients"])
    beside = run.tier_bytes()["opt_state"]["device"]  # the count of steps
    assert found[0].lying_bytes == first.argument_bytes + beside
    assert found[0].peak_bytes == first.peak_bytes + beside


def test_before_a_group_is_updated_all_gradients_and_its_neighbours_lie_on_the_device():
    run, stream = run_of(optimizer="host"), stream_of(optimizer="host")
    first, middle, last = list(moments.moments(run, stream, programs_of(run, None)))[1:]
    groups = [group.state.nbytes for group in stream.groups]
    grads = [sum(math.prod(cut.shape) * 4 for cut in group.cuts) for group in stream.groups]  # as they have arrived
    assert [first.in_flight_bytes, middle.in_flight_bytes] == [sum(groups[:2]), sum(groups)]
    state = run.tier_bytes()
    held = state["params"]["device"] + state["opt_state"]["device"] + 3 * 4 + 16 * (SEQ + 1) * 4 // 8
    assert first.lying_bytes == held + run.grads_bytes() + sum(grads[:2]) + sum(groups[:2])
    assert last.lying_bytes == held + run.grads_bytes() - sum(grads[:2]) + grads[2] + sum(groups[1:])


def test_parameters_on_the_host_leave_the_device_and_what_is_published_comes_back():
    here, away = plan_of(1, optimizer="host").memory, plan_of(1, optimizer="host", params="host").memory
    assert here.at_rest_bytes - away.at_rest_bytes == run_of(1).tier_bytes()["params"]["device"]
    assert away.peak_bytes < here.peak_bytes


@pytest.mark.parametrize("absent", [False, pytest.param(True, marks=needs_compiler)])
def test_parameters_in_files_are_read_for_both_passes_of_a_microbatch_and_written_once(absent):
    where = {"optimizer": "nvme", "params": "nvme", "dir": ("anywhere",)}
    run = run_of(absent=absent, **where)
    plan = jzero.plan.of(run, gpus.parse("h100") if absent else None)
    moved = {(m.what, m.when): m for m in plan.offload.moved}
    rest = run.tier_bytes()
    params = rest["params"]["nvme"]
    stacked = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(run.abstract_state.params["layers"])) // 8
    assert (moved["parameters", "update"].read_bytes, moved["parameters", "update"].written_bytes) == (params, params)
    assert moved["parameters", "passes"].read_bytes == 2 * (2 * stacked + (params - stacked))
    assert moved["optimizer state", "update"].read_bytes == rest["opt_state"]["nvme"]
    assert plan.memory.at_rest_bytes == sum(tiers["device"] for tiers in rest.values()) + 3 * 4


def test_a_state_updated_by_the_host_never_flies():
    memory = plan_of(optimizer="host", update="cpu").memory
    assert memory.in_flight_bytes == 0
    assert plan_of(optimizer="host").memory.in_flight_bytes == sum(
        x.state.nbytes for x in stream_of(optimizer="host").groups
    )


def test_a_step_in_groups_sends_what_a_step_at_once_sends():
    once, grouped = plan_of(1).traffic, plan_of(1, optimizer="host").traffic
    large = {(s.kind, s.axes, s.dtype): s.message_bytes for s in once.sent if s.kind != "all-reduce"}
    assert large
    assert large == {(s.kind, s.axes, s.dtype): s.message_bytes for s in grouped.sent if s.kind != "all-reduce"}


def test_a_plan_with_tiers_is_said_and_survives_json():
    plan = plan_of(optimizer="host", params="host")
    adapter = pydantic.TypeAdapter(jzero.plan.Plan)
    assert adapter.validate_json(adapter.dump_json(plan)) == plan
    said = jzero.plan.text.describe(plan)
    assert "at rest: parameters, m, v; 0.57 of a machine's memory" in said
    assert "of program 'gradients'" in said


@needs_compiler
def test_what_rests_on_the_host_of_an_absent_gpu_is_taken_off_its_device():
    run = run_of(absent=True, optimizer="host", params="host")
    plan = jzero.plan.of(run, "h100")
    assert plan.memory.tiers == plan_of(optimizer="host", params="host").memory.tiers
    assert plan.memory.argument_bytes < run.tier_bytes()["params"]["host"]
    assert plan.memory.peak_bytes == plan.memory.argument_bytes + plan.memory.temp_bytes
    assert plan.time
    assert plan.offload
    assert plan.time.step_s == plan.offload.step_s > plan.offload.without_s > 0
    assert "times the" in jzero.plan.text.describe(plan)


def moved(**where):
    found = plan_of(**where).offload
    assert found is not None
    return {(m.what, m.when): (m.up_bytes, m.down_bytes, m.read_bytes, m.written_bytes) for m in found.moved}


def test_bytes_over_pcie_and_to_disk_are_those_of_what_rests_there():
    state = sum(group.state.nbytes for group in stream_of(optimizer="host").groups)
    params = run_of().tier_bytes()["params"]["device"]
    assert plan_of().offload is None
    assert moved(optimizer="host") == {("optimizer state", "update"): (state, state, 0, 0)}
    assert moved(optimizer="nvme", dir=("anywhere",)) == {("optimizer state", "update"): (state, state, state, state)}
    assert moved(optimizer="host", update="cpu") == {
        ("gradients", "update"): (0, params, 0, 0),
        ("parameters", "update"): (params, params, 0, 0),
    }
    tables = (2 * VOCAB * 32 + 32) * 4 // 8  # and the last norm: they stay on the device until the backward pass
    assert moved(params="host") == {  # two passes of two microbatches, and the update
        ("parameters", "passes"): (4 * params - 2 * tables, 0, 0, 0),
        ("parameters", "update"): (params, params, 0, 0),
    }


def time_of(step_s, passes_s, update_s):
    return Estimate(step_s, step_s, 0.0, 0.0, 0, 0.5, 8, 1, 0.0, (), (), (), {"passes": passes_s, "update": update_s})


def test_what_does_not_hide_behind_its_part_of_the_step_is_waited_for():
    gpu = targets.parse("h100:pcie_gb_per_s=50,disk_gb_per_s=8,host_gb_per_s=240")  # copies reach 40 GB/s
    time = time_of(3.0, 2.0, 1.0)
    hidden = Offloading((Moved("parameters", "passes", 80 * 10**9), Moved("optimizer state", "update", 0)), 0, 8)
    later, cost = slowed(time, hidden, gpu, 0)
    assert (later.step_s, cost.slowdown, cost.needed_gb_per_s) == (3.0, 1.0, {"passes": 40.0})
    state = Offloading((Moved("optimizer state", "update", 120 * 10**9, 120 * 10**9),), 0, 8)
    later, cost = slowed(time, state, gpu, 10**9)
    assert later.step_s == pytest.approx(3.0 + 2.0 + 0.05), "3 s over PCIe beside 1 s, and the first and last group"
    assert cost.slowdown == pytest.approx(5.05 / 3)
    assert later.mfu == pytest.approx(0.5 * 3 / 5.05)
    files = Offloading((Moved("optimizer state", "update", 10**9, 10**9, 4 * 10**9, 4 * 10**9),), 0, 8)
    assert slowed(time, files, gpu, 0)[1].step_s == pytest.approx(3.0 + 3.0), "8 devices share the disks"
    by_host = Offloading((Moved("gradients", "update", 0, 10**9),), 10**10, 1)
    assert slowed(time, by_host, gpu, 0)[1].step_s == pytest.approx(3.0 + 0.25), "30 bytes an element"


def test_a_state_updated_on_the_device_is_pinned_and_one_updated_by_the_host_is_not():
    tiers = run_of(optimizer="host", params="host").tier_bytes()
    assert run_of(optimizer="host", params="host").pinned_bytes() == sum(x.get("host", 0) for x in tiers.values())
    assert run_of(optimizer="host", update="cpu").pinned_bytes() == 0
    assert run_of().pinned_bytes() == 0
