"""Offload equals no offload: the same programs give the same bits wherever the optimizer's state rests."""

import itertools
import re
from typing import Any

import jax
import numpy as np
import one_device as single
import optax
import pytest
from flax.traverse_util import flatten_dict
from tiny_decoder import batches
from tiny_stack import stack
from trained import Trained, arrays, assert_same_bits, devices, held, watched
from trained import train as train_run

import jzero
from jzero.models.decoder import next_token_loss
from jzero.offload.at_rest import on_device
from jzero.offload.pieces import Pieces, leaves_of
from jzero.offload.under_way import IN_FLIGHT

STEPS, ROWS = 20, 16
MESHES = {"one device": "dp=1", "dp4 tp2": "dp=4,tp=2"}
GROUP = 9_000  # bytes: less than some parameters have on one device, so there are pieces, and many groups

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")


@pytest.fixture(scope="module")
def data():
    return batches(STEPS, ROWS)


def adamw(per_layer: Any) -> optax.GradientTransformation:
    return jzero.make_optimizer("adamw", optax.linear_schedule(1e-3, 1e-4, STEPS), per_layer, weight_decay=0.1)


def train(data, mesh: str, stage: int, steps: int = STEPS, tx: Any = adamw, **settings: Any) -> Trained:
    """A training with weight decay, clipping and four microbatches."""
    axes = MESHES[mesh]
    precision = settings.pop("precision", jzero.Precision())
    run = jzero.setup(
        stack(layers=4, layers_ahead=1),
        next_token_loss,
        tx,
        jzero.make_mesh(axes, devices(axes)),
        data[0],
        stage=stage,
        micro_batches=4,
        clip_norm=0.5,
        precision=precision,
        offload=jzero.Offload(**({"group_size": GROUP} | settings)),
    )
    return train_run(run, data[:steps])


@pytest.fixture(scope="module")
def trained(data):
    """Trainings by mesh, stage and placement, each made once."""
    made: dict[Any, Trained] = {}

    def of(mesh: str, stage: int, **settings: Any) -> Trained:
        key = (mesh, stage, *sorted(settings.items()))
        if key not in made:
            made[key] = train(data, mesh, stage, **settings)
        return made[key]

    return of


QUICK = {("one device", 2), ("dp4 tp2", 3)}
CELLS = [
    pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow)
    for cell in itertools.product(MESHES, (1, 2, 3))
]


def placements(tmp_path) -> dict[str, dict[str, Any]]:
    """How the state is offloaded; of the files, the first groups stay in memory."""
    files = {"optimizer": "nvme", "dir": (str(tmp_path / "a"), str(tmp_path / "b")), "host_bytes": 2 * GROUP}
    return {"host": {"optimizer": "host"}, "nvme": files}


@pytest.mark.parametrize(("mesh", "stage"), CELLS)
def test_streaming_gives_the_bits_of_the_same_programs_on_the_device(mesh, stage, trained, data, tmp_path):
    reference = trained(mesh, stage, optimizer="device")
    for settings in placements(tmp_path).values():
        assert_same_bits(train(data, mesh, stage, **settings), reference)


@pytest.mark.parametrize(("mesh", "stage"), CELLS)
def test_updates_in_groups_follow_the_update_at_once(mesh, stage, trained):
    at_once, in_groups = trained(mesh, stage, optimizer="none"), trained(mesh, stage, optimizer="device")
    np.testing.assert_allclose(in_groups.losses, at_once.losses, rtol=1e-5)
    np.testing.assert_allclose(in_groups.norms[0], at_once.norms[0], rtol=1e-5)


@pytest.mark.parametrize(("mesh", "stage"), CELLS)
def test_updates_on_the_cpu_follow_the_update_at_once(mesh, stage, trained, data, tmp_path):
    at_once = trained(mesh, stage, optimizer="none")
    for settings in placements(tmp_path).values():
        on_cpu = train(data, mesh, stage, update="cpu", **settings)
        np.testing.assert_allclose(on_cpu.losses, at_once.losses, rtol=1e-5)
        np.testing.assert_allclose(on_cpu.norms[0], at_once.norms[0], rtol=1e-5)


@pytest.mark.parametrize("update", ["device", "cpu"])
def test_step_1_gradients_are_those_of_the_run_that_is_not_offloaded(update, data, tmp_path):
    def first_gradients(**settings: Any) -> dict[Any, np.ndarray]:
        tx = single.recording(optax.adamw(1e-3, weight_decay=0.1))
        after = train(data, "dp4 tp2", 3, steps=1, tx=tx, **settings)
        return {path: np.asarray(on_device(x)) for path, x in flatten_dict(after.state.opt_state.grads).items()}

    expected = first_gradients()
    for settings in placements(tmp_path).values():
        grads = first_gradients(update=update, **settings)
        for path, x in expected.items():
            np.testing.assert_allclose(grads[path], x, rtol=1e-5, atol=1e-9, err_msg=str(path))


@pytest.mark.parametrize("params", [pytest.param("none", marks=pytest.mark.slow), "host"])
def test_16_bit_parameters_with_masters_are_the_same_wherever_they_rest(params, data):
    """Parameters on the host too: they are updated piece by piece where they rest."""
    precision = jzero.Precision(params="bfloat16")
    reference = train(data, "dp4 tp2", 3, steps=4, optimizer="device", precision=precision)
    for update in ("device", "cpu"):
        where = {"optimizer": "host", "update": update, "params": params, "min_param_bytes": 0}
        other = train(data, "dp4 tp2", 3, steps=4, precision=precision, **where)
        if update == "device":
            assert_same_bits(other, reference)
        np.testing.assert_allclose(other.losses, reference.losses, rtol=1e-5)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(other.state.params)}
        assert kinds == {"pinned_host" if params == "host" else "device"}


@pytest.mark.parametrize("name", [pytest.param("muon", marks=pytest.mark.slow), "adafactor"])
def test_what_takes_whole_matrices_streams_by_whole_parameters(name, data):
    def tx(per_layer: Any) -> optax.GradientTransformation:
        return jzero.make_optimizer(name, 1e-3, per_layer)

    reference = train(data, "dp4 tp2", 3, steps=3, tx=tx, optimizer="device")
    assert_same_bits(train(data, "dp4 tp2", 3, steps=3, tx=tx, optimizer="host"), reference)
    at_once = train(data, "dp4 tp2", 3, steps=3, tx=tx)
    np.testing.assert_allclose(reference.losses, at_once.losses, rtol=1e-5)


def test_nothing_of_the_state_rests_on_the_device_and_three_groups_at_most_come_there(trained, data):
    small = trained("dp4 tp2", 3, optimizer="device")
    offloaded = train(data, "dp4 tp2", 3, steps=2, optimizer="host")
    parts = [part for leaf in leaves_of(offloaded.state.opt_state) if isinstance(leaf, Pieces) for part in leaf.parts]
    assert {part.sharding.memory_kind for part in parts} == {"pinned_host"}
    held = offloaded.run.tier_bytes()["opt_state"]
    assert held["device"] == 12  # three counters
    assert held["host"] == small.run.tier_bytes()["opt_state"]["device"] - 12
    assert offloaded.run.stream is not None
    flow = offloaded.run.stream.flow
    assert flow.groups == IN_FLIGHT == 3
    assert not flow.in_flight


def test_host_memory_never_holds_the_state_twice(data):
    run = jzero.setup(
        stack(), next_token_loss, adamw, "dp=8", data[0], offload=jzero.Offload("host", group_size=GROUP // 2)
    )
    state = run.init()
    before, seen = held("pinned_host"), list[int]()
    assert before >= run.pinned_bytes() > 0
    watched(run, lambda: seen.append(held("pinned_host")))(state, run.put(data[0]))
    assert len(seen) > IN_FLIGHT
    assert max(seen) <= before


@pytest.mark.parametrize("layers", [2, 8])
def test_the_state_in_flight_does_not_grow_with_the_model(layers, data):
    run = jzero.setup(
        stack(layers), next_token_loss, adamw, "dp=8", data[0], offload=jzero.Offload("host", group_size=GROUP)
    )
    stream = run.stream
    assert stream is not None
    run.step(run.init(), data[0])
    assert stream.flow.groups <= 3
    assert stream.flow.nbytes <= 3 * GROUP
    assert (len(stream.groups) > 3) or layers == 2
    updates = [compiled.compile().memory_analysis() for name, compiled in run.lower().items() if "update" in name]
    assert max(m.argument_size_in_bytes for m in updates) < sum(run.tier_bytes()["opt_state"].values()) + 2**20


def test_a_step_that_is_skipped_leaves_the_state_as_it_was(data):
    broken = {**data[1], "weights": np.full_like(data[1]["weights"], np.inf)}
    for settings in ({}, {"update": "cpu"}):
        after = train(data, "one device", 3, steps=1, optimizer="host", **settings)
        before = [np.asarray(on_device(leaf)).copy() for leaf in leaves_of(after.state.opt_state)]
        params = {path: x.copy() for path, x in after.params.items()}
        state, metrics = after.run.step(after.state, broken)
        assert int(metrics["skipped"]) == 1
        for old, new in zip(before, leaves_of(state.opt_state), strict=True):
            np.testing.assert_array_equal(old, np.asarray(on_device(new)))
        for path, x in arrays(state).items():
            np.testing.assert_array_equal(x, params[path])


def test_an_optimizer_that_needs_all_gradients_at_once_is_refused_by_name(data):
    tx = optax.chain(optax.clip_by_global_norm(1e9), optax.adam(1e-3))
    with pytest.raises(ValueError, match=r"cannot be run in groups: parameter .* belongs into clip_norm"):
        train(data, "dp4 tp2", 3, tx=tx, optimizer="host")


def test_the_cpu_refuses_what_takes_whole_matrices(data):
    with pytest.raises(ValueError, match=r"offload.update = cpu: tx does not take parameter .* element by element"):
        train(
            data,
            "dp4 tp2",
            3,
            tx=lambda per_layer: jzero.make_optimizer("muon", 1e-3, per_layer),
            optimizer="host",
            update="cpu",
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "disk"}, "offload.optimizer = disk is not one of none, device, host, nvme"),
        ({"update": "cpu"}, "offload.update = cpu with offload.optimizer = none"),
        ({"update": "delayed"}, "one step late"),
        ({"optimizer": "nvme"}, "needs offload.dir"),
        ({"optimizer": "host", "dir": ("/tmp",)}, "offload.dir"),
        ({"optimizer": "host", "host_bytes": 1}, "offload.host_bytes"),
        ({"group_size": 0}, "offload.group_size"),
        ({"group_size": True}, "offload.group_size"),
    ],
)
def test_placements_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        jzero.Offload(**settings)


def test_a_state_whose_files_were_overwritten_is_refused(data, tmp_path):
    after = train(data, "dp4 tp2", 3, steps=1, optimizer="nvme", dir=(str(tmp_path),))
    after.run.init()
    with pytest.raises(ValueError, match="overwritten by a later step, or by a newer state"):
        after.run.step(after.state, data[0])
