"""What a plan says of a run, held to the compiled program: at rest and sent, byte for byte."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest
from flax import nnx
from tiny_decoder import SEQ, decoder

import jzero
import jzero.plan
from jzero import targets
from jzero.mesh import DATA_AXES
from jzero.models.decoder import next_token_loss
from jzero.plan import __main__ as cli
from jzero.plan.traffic import BETWEEN_HOSTS, IN_HOST, link_of

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")

needs_compiler = pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))


@functools.cache
def run_and_plan(mesh, stage, micro_batches, remat="none", ahead=1):
    batch = {"tokens": jax.ShapeDtypeStruct((8 * micro_batches, SEQ + 1), jnp.int32)}
    model = decoder(remat=remat, layers=4, layers_ahead=ahead)
    run = jzero.setup(
        model, next_token_loss, optax.adamw(1e-3), mesh, batch, stage=stage, micro_batches=micro_batches, clip_norm=1.0
    )
    return run, jzero.plan.of(run)


# Every pair of values occurs among the quick ones.
QUICK = {("dp=8", 0, 1), ("dp=4,tp=2", 0, 4), ("dp=8", 1, 4), ("dp=4,tp=2", 1, 1)}
QUICK |= {("dp=8", 2, 1), ("dp=4,tp=2", 2, 4), ("dp=8", 3, 4), ("dp=4,tp=2", 3, 1)}
PRODUCT = [(mesh, stage, m) for mesh in ("dp=8", "dp=4,tp=2") for stage in range(4) for m in (1, 4)]
CELLS = [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow) for cell in PRODUCT]


@pytest.mark.parametrize(("mesh", "stage", "micro_batches"), CELLS)
def test_bytes_at_rest_are_the_arguments_of_the_program(mesh, stage, micro_batches):
    run, plan = run_and_plan(mesh, stage, micro_batches)
    memory = plan.memory
    assert memory.at_rest_bytes + memory.batch_bytes == memory.argument_bytes
    assert sum(memory.tiers.values()) == memory.at_rest_bytes
    assert plan.stage == stage
    assert memory.bytes_of("m") == memory.bytes_of("v")
    assert memory.bytes_of("gradients") == run.grads_bytes()


@pytest.mark.parametrize(("mesh", "stage", "micro_batches"), CELLS)
def test_traffic_that_is_written_is_the_traffic_of_the_program(mesh, stage, micro_batches):
    """But for a scalar per leaf, summed by the compiler for the gradient norm."""
    run, plan = run_and_plan(mesh, stage, micro_batches)
    assert plan.traffic.sent
    for sent in plan.traffic.sent:
        if sent.written_bytes is None:
            assert not set(sent.axes) <= set(DATA_AXES)
        elif sent.kind == "all-reduce":
            scalars = 4 * len(jax.tree.leaves(run.abstract_state.params)) if stage else 0
            assert 0 <= sent.message_bytes - sent.written_bytes <= scalars
        else:
            assert sent.message_bytes == sent.written_bytes


def test_parts_stand_beside_the_formula_and_say_where_they_differ():
    _, plan = run_and_plan("dp=8", 3, 1)
    parts = {part.name: part for part in plan.memory.parts}
    psi = plan.parameters
    assert parts["m"].formula_bytes == 4 * psi / 8
    assert parts["parameters"].formula_bytes == 2 * psi / 8
    assert "4 bytes a number instead of 2" in parts["parameters"].why
    assert parts["master"].nbytes == 0
    assert parts["master"].why == "the run keeps none"
    assert plan.memory.formula_bytes == 16 * psi / 8


def test_a_link_is_the_slowest_between_devices_of_a_group():
    mesh = jzero.make_mesh("node=2,dp=2,tp=2")
    links = {axes: link_of(mesh, axes, 4) for axes in [("node",), ("dp",), ("tp",), ("node", "dp")]}
    assert links == {("node",): BETWEEN_HOSTS, ("dp",): IN_HOST, ("tp",): IN_HOST, ("node", "dp"): BETWEEN_HOSTS}
    assert link_of(mesh, ("node", "dp"), 8) == IN_HOST


def test_a_model_of_ones_own_is_planned():
    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    def loss(model, batch):
        return jnp.sum((model(batch["x"]) - batch["x"]) ** 2), batch["x"].size

    batch = {"x": np.zeros((16, 64), np.float32)}
    run = jzero.setup(lambda: Mlp(nnx.Rngs(0)), loss, optax.sgd(0.1, momentum=0.9), "dp=8", batch, stage=3)
    plan = jzero.plan.of(run, capacity_bytes=10_000)
    assert plan.memory.argument_bytes == plan.memory.at_rest_bytes + plan.memory.batch_bytes
    assert plan.memory.bytes_of("m") == 4 * 33_088 // 8, "sgd's momentum"
    assert {part.name: part.why for part in plan.memory.parts}["v"] == "the run keeps none"
    said = jzero.plan.text.describe(plan)
    assert "too much for 0.01" in said
    assert "33,088 parameters, stage 3" in said


def test_a_plan_survives_json():
    _, plan = run_and_plan("dp=8", 3, 1)
    adapter = pydantic.TypeAdapter(jzero.plan.Plan)
    assert adapter.validate_json(adapter.dump_json(plan)) == plan


def command(*argv):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return subprocess.run(
        [sys.executable, "-m", "jzero.plan", *argv], capture_output=True, text=True, env=environment, check=False
    )


def test_the_command_starts_as_many_fake_devices_as_the_mesh_has():
    done = command("--target", "cpu", "--mesh", "dp=3", "--stage", "2", "--json", "--run.cache_dir", "none")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["mesh"] == {"node": 1, "dp": 3, "tp": 1}
    assert plan["rows"] == 3
    assert plan["fits"] is True
    assert plan["settings"]["stage"] == 2
    assert "batch_size is not named: 3 sequences" in plan["notes"][-1]
    assert plan["stage"] == 2


@needs_compiler
def test_the_command_plans_for_gpus_that_are_not_here(capsys):
    argv = ["--target", "h100", "--mesh", "node=2,dp=8", "--model.layers", "4", "--run.cache_dir", "none"]
    assert cli.main(argv) == 0
    first = capsys.readouterr().out
    assert "16 x NVIDIA H100 80GB HBM3 (not here, compiled for)" in first
    assert "between hosts" in first
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == first, "the same plan made twice is identical"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--target", "h1000"), "h100"),
        (("--targt", "h100"), "did you mean --target?"),
        (("--mesh", "dp=16"), "needs 16 devices"),
        (("--target", "h100", "--mesh", "dp=12"), "12 devices"),
        (("--target", "h100", "--mesh", "dp=5,tp=2"), "10 devices"),
        (("--target", "h100", "--mesh", "dp=-1,tp=3", "--devices", "8"), "tp = 3 must divide"),
        (("--batch_size", "3", "--mesh", "dp=8"), "batch_size"),
        pytest.param(("--target", "v100-16"), "has no bfloat16", marks=needs_compiler),
        pytest.param(
            ("--target", "rtx4090", "--mesh", "node=3,dp=8"), "rtx4090:nic_gb_per_s=12.5", marks=needs_compiler
        ),
        (("--mesh", "dp=8", "--meshes", "dp=4,tp=2"), "--mesh and --meshes exclude each other"),
        (("--margin", "2"), "--margin"),
        (("--devices", "none"), "--devices"),
    ],
)
def test_bad_input_is_one_line_and_status_2(argv, said, capsys):
    assert cli.main(list(argv)) == 2
    err = capsys.readouterr().err.strip()
    assert said in err
    assert "\n" not in err


@pytest.mark.parametrize(
    ("mesh", "zero", "vocab", "why"),
    [
        ("node=2,dp=4", jzero.Zero(axes=("dp",)), 96, "sharded over 4 of 8 devices"),
        ("dp=8", jzero.Zero(replicate=("embedding/*", "head/*")), 97, "+5,432 numbers, of 2 leaves that stay whole"),
        ("dp=4,tp=2", jzero.Zero(), 96, "+20 numbers, of 3 leaves that are not split by tp"),
    ],
)
def test_what_differs_from_the_formula_has_its_reason(mesh, zero, vocab, why):
    batch = {"tokens": jax.ShapeDtypeStruct((8, SEQ + 1), jnp.int32)}
    run = jzero.setup(decoder(vocab=vocab), next_token_loss, optax.adamw(1e-3), mesh, batch, stage=3, zero=zero)
    plan = jzero.plan.of(run)
    assert {part.name: part.why for part in plan.memory.parts}["m"] == why
    assert any("whole on every device: 2 leaves" in note for note in plan.notes) == (vocab == 97)


def test_a_plan_is_of_the_devices_that_the_run_is_on():
    run, _ = run_and_plan("dp=8", 3, 4)
    with pytest.raises(ValueError, match="the run is on cpu, and the plan asked for is of NVIDIA H100"):
        jzero.plan.of(run, "h100")


@needs_compiler
def test_time_is_estimated_for_a_gpu_with_every_assumption():
    gpu = targets.parse("h100")
    mesh = jzero.make_mesh("node=2,dp=8", targets.gpu_devices(gpu, 16))
    batch = {"tokens": jax.ShapeDtypeStruct((16, 129), jnp.int32)}
    run = jzero.setup(
        decoder(layers=4, layers_ahead=1, width=64, mlp_width=128, dtype="bfloat16"), next_token_loss,
        optax.adamw(1e-3), mesh, batch, stage=3, precision=jzero.Precision(params="bfloat16"),
    )  # fmt: skip
    time = jzero.plan.of(run, gpu, tokens=jzero.plan.Tokens(128, 1e6)).time
    assert time is not None
    assert time.step_s == pytest.approx(time.compute_s + time.exposed_s)
    assert time.tokens == 16 * 128
    assert time.tokens_here == 128
    assert time.mfu == pytest.approx(16 * 128 * 1e6 / time.step_s / (16 * 989e12))
    assert {(s.phase, s.where, s.kind) for s in time.shares} >= {
        ("forward", "layers", "all-gather"),
        ("backward", "layers", "all-gather"),
        ("backward", "layers", "reduce-scatter"),
    }
    assert any("groups along node+dp: network" in line for line in time.assumptions)
    assert {line.phase for line in time.loops} == {"forward", "backward"}
    sending = sum(share.seconds for share in time.shares)
    assert time.tokens_to_hide == pytest.approx(128 * sending / time.compute_s)
    assert sending - sum(share.hidden_s for share in time.shares) == pytest.approx(time.exposed_s)
