"""A plan of a run whose gradients rest on the host: what it says against compiled programs, and arrays of a step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from tiny_decoder import SEQ, batches
from tiny_stack import stack
from trained import held, watched

import jzero
import jzero.plan
from jzero import hlo, hlo_host, host_memory, targets
from jzero.models.decoder import next_token_loss
from jzero.plan import moments
from jzero.plan.offloading import Moved, Offloading, offloading_of, slowed
from jzero.plan.programs import programs_of, state_in_flight
from jzero.targets import COMPILER_OPTIONS

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")

needs_compiler = pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))

GROUP = 10_500  # three groups of gradients and the optimizer's state
SCALARS = 200  # bytes


@functools.cache
def run_of(*, micro_batches=2, absent=False, layers=4, mesh="dp=8", stage=3, **where):
    devices = targets.gpu_devices("h100", 8) if absent else jax.devices()
    batch = {"tokens": jax.ShapeDtypeStruct((16, SEQ + 1), jnp.int32)}
    return jzero.setup(
        stack(layers, layers_ahead=1, remat="full"),
        next_token_loss,
        optax.adamw(1e-3),
        jzero.make_mesh(mesh, devices[: 1 if mesh == "dp=1" else 8]),
        batch,
        stage=stage,
        micro_batches=micro_batches,
        offload=jzero.Offload(group_size=GROUP, min_param_bytes=0, **where),
    )


def rows():
    return {"tokens": batches(1, 16)[0]["tokens"]}


@functools.cache
def gradients_of(**of):
    """The compiled passes, for absent GPUs."""
    return run_of(absent=True, **of).lower()["gradients"].compile(compiler_options=COMPILER_OPTIONS)


# ---- host memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_pinned_bytes_are_those_of_the_arrays_that_a_step_leaves_in_host_memory(micro_batches):
    before = held("pinned_host")
    run = run_of(micro_batches=micro_batches, optimizer="host", params="host", grads="host")
    state, _ = run.step(run.init(), run.put(rows()))
    jax.block_until_ready(state.params)
    assert held("pinned_host") - before == run.pinned_bytes()
    assert run.stream is not None
    run.stream.memory.take()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_on_the_host_once_or_with_microbatches_twice(micro_batches):
    here = jzero.plan.of(run_of(micro_batches=micro_batches, optimizer="host")).memory
    away = jzero.plan.of(run_of(micro_batches=micro_batches, optimizer="host", grads="host")).memory
    assert here.bytes_of("gradients") > 0
    assert away.bytes_of("gradients") == 0
    assert away.tiers["host"] - here.tiers["host"] == micro_batches * here.bytes_of("gradients")
    assert away.pinned_bytes == away.tiers["host"]
    assert run_of(micro_batches=micro_batches, optimizer="host", grads="host").grads_bytes() == 0
    said = next(part.why for part in away.parts if part.name == "gradients")
    assert ("twice on the host" in said) == (micro_batches == 2)


# ---- the device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [{}, {"grads": "host"}, {"grads": "host", "params": "host"}], ids=str)
def test_what_lies_on_the_device_at_an_update_is_what_the_plan_says(where):
    run = run_of(optimizer="host", **where)
    assert run.stream is not None
    seen: list[int] = []
    before = held("device")
    watched(run, lambda: seen.append(held("device") - before))(run.init(), run.put(rows()))
    planned = [x for x in moments.moments(run, run.stream, programs_of(run, None)) if "update" in x.program]
    for k, moment in enumerate(planned):
        leaving = run.stream.groups[k - 1].state.nbytes if k else 0  # nobody's array any more
        assert seen[k] == pytest.approx(moment.lying_bytes - leaving, abs=SCALARS)
        assert moment.in_flight_bytes == state_in_flight(run.stream, k)


@needs_compiler
def test_gradients_on_the_host_of_an_absent_gpu_leave_room_on_it():
    def taken(**where):
        program = hlo.memory(gradients_of(micro_batches=1, layers=72, optimizer="host", **where))
        return program.temp_bytes + program.output_bytes

    grads = run_of(absent=True, micro_batches=1, layers=72, optimizer="host").grads_bytes()
    assert taken() - taken(grads="host") > 0.9 * grads


# ---- traffic --------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("where", "micro_batches", "mesh", "stage"),
    [
        ({"grads": "host"}, 1, "dp=4,tp=2", 2),
        ({"grads": "host"}, 2, "dp=1", 0),
        ({"grads": "host", "params": "host"}, 2, "dp=8", 3),
        ({"params": "host"}, 2, "dp=8", 3),
    ],
)
def test_what_the_passes_move_is_what_the_compiled_program_moves(where, micro_batches, mesh, stage):
    of = {"micro_batches": micro_batches, "mesh": mesh, "stage": stage, **where}
    found, run = hlo_host.moved(gradients_of(**of)), run_of(absent=True, **of)
    planned = offloading_of(run, 8)
    assert planned is not None
    up, down = (sum(planned.total(way, when) for when in ("passes", "sums")) for way in ("up_bytes", "down_bytes"))
    assert found.up_bytes == up
    lone = 2 * run.grads_bytes() if "grads" not in where else (2 * 96 * 32 + 32) * 4 // 8  # tables and the last norm
    assert down - lone <= found.down_bytes <= down, "the compiler may leave out a store that is overwritten"


@needs_compiler
def test_the_host_memory_of_the_compiled_passes_is_that_of_the_plan():
    stats = gradients_of(grads="host").memory_analysis()
    assert stats.host_output_size_in_bytes == run_of(grads="host").host_grads_bytes()


def test_gradients_for_an_update_by_the_host_come_up_to_be_finished_and_go_down_again():
    run = run_of(micro_batches=1, optimizer="host", update="cpu", grads="host")
    found = offloading_of(run, 8)
    assert found is not None
    assert [m for m in found.moved if (m.what, m.when) == ("gradients", "update")] == [
        Moved("gradients", "update", run.host_grads_bytes(), run.host_grads_bytes())
    ]


def test_sums_and_the_norm_hide_behind_nothing():
    gpu = targets.parse("h100:pcie_gb_per_s=50")  # copies reach 40 GB/s
    time = jzero.plan.estimate.Estimate(
        3.0, 3.0, 0.0, 0.0, 0, 0.5, 8, 1, 0.0, (), (), (), {"passes": 2.0, "update": 1.0}
    )
    grads = Offloading(
        (Moved("gradients", "passes", 0, 40 * 10**9), Moved("gradients", "sums", 8 * 10**9, 4 * 10**9)), 0, 8
    )
    _, cost = slowed(time, grads, gpu, 0)
    assert cost.step_s == pytest.approx(3.0 + 0.3), "what goes down during the passes hides, 12 GB at 40 GB/s do not"
    assert cost.needed_gb_per_s == {"passes": pytest.approx(20.0)}
    no_link = targets.parse("h100:pcie_gb_per_s=0")
    assert slowed(time, Offloading((Moved("gradients", "update", 0, 0),), 0, 8), no_link, 0)[1].step_s == 3.0


# ---- words ----------------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_plan_for_absent_gpus_with_everything_on_the_host_is_said():
    run = run_of(absent=True, optimizer="host", params="host", grads="host")
    plan = jzero.plan.of(run, "h100")
    memory, said = plan.memory, jzero.plan.text.describe(plan)
    assert memory.tiers == jzero.plan.of(run_of(optimizer="host", params="host", grads="host")).memory.tiers
    assert memory.at_rest_bytes < SCALARS, "counters alone"
    passes = hlo.memory(gradients_of(optimizer="host", params="host", grads="host"))
    assert memory.peak_program == "gradients"
    assert memory.temp_bytes == passes.temp_bytes + passes.output_bytes
    assert "at rest: parameters, gradients, m, v" in said
    assert f"pinned {memory.pinned_bytes / 1e6:.2g}" in " ".join(said.split())
    assert "for a process with 8 devices; XLA gives a process 64 GiB" in said
    assert "gradients, in sums and norm" in said
    large = dataclasses.replace(plan, memory=dataclasses.replace(memory, pinned_bytes=20 * 2**30))
    assert f"64 GiB unless {host_memory.VARIABLE}=160 or more is set" in jzero.plan.text.describe(large)
