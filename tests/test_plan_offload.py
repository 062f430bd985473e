"""A plan of a run that keeps part of its state outside of the device: where it rests, and when a device holds most."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pydantic
import pytest
from tiny_decoder import SEQ, decoder

import jzero
import jzero.plan
from jzero import hlo, targets
from jzero.models.decoder import next_token_loss
from jzero.plan import moments
from jzero.plan.programs import programs_of

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")

needs_compiler = pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))

GROUP = 20_000  # three groups of the optimizer's state


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
    found = list(moments.moments(run, stream_of(optimizer="host"), programs, 0))
    assert [moment.program for moment in found] == ["gradients", *(x for x in programs.compiled if "update" in x)]
    assert memory.peak_bytes == max(moment.peak_bytes for moment in found)
    assert memory.peak_program == "gradients"
    first = hlo.memory(programs.compiled["gradients"])
    beside = run.tier_bytes()["opt_state"]["device"]  # the count of steps
    assert found[0].lying_bytes == first.argument_bytes + beside
    assert found[0].peak_bytes == first.peak_bytes + beside


def test_before_a_group_is_updated_all_gradients_and_its_neighbours_lie_on_the_device():
    run = run_of(optimizer="host")
    first, middle, last = list(moments.moments(run, stream_of(optimizer="host"), programs_of(run, None), 0))[1:]
    groups = [group.nbytes for group in stream_of(optimizer="host").groups]
    assert [first.in_flight_bytes, middle.in_flight_bytes] == [sum(groups[:2]), sum(groups)]
    state = run.tier_bytes()
    held = state["params"]["device"] + state["opt_state"]["device"] + 3 * 4 + 16 * (SEQ + 1) * 4 // 8
    assert first.lying_bytes == held + run.grads_bytes() + sum(groups[:2])
    gone = sum(math.prod(cut.shape) * 4 for group in stream_of(optimizer="host").groups[:2] for cut in group.cuts)
    assert last.lying_bytes == held + run.grads_bytes() - gone + sum(groups[1:])


def test_parameters_on_the_host_leave_the_device_and_what_is_published_comes_back():
    here, away = plan_of(1, optimizer="host").memory, plan_of(1, optimizer="host", params="host").memory
    assert here.at_rest_bytes - away.at_rest_bytes == run_of(1).tier_bytes()["params"]["device"]
    assert away.peak_bytes < here.peak_bytes


def test_a_state_updated_by_the_host_never_flies():
    memory = plan_of(optimizer="host", update="cpu").memory
    assert memory.in_flight_bytes == 0
    assert plan_of(optimizer="host").memory.in_flight_bytes == sum(x.nbytes for x in stream_of(optimizer="host").groups)


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
    assert any("two layers of each stack" in note for note in plan.notes)
