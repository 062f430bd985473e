"""Parameters in files: the bits of parameters on the device, and never more of them in memory than a few layers."""

import functools
import gc
import itertools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from tiny_decoder import batches
from tiny_stack import WIDTH, stack
from trained import Trained, arrays, assert_same_bits, devices
from trained import train as train_run

import jzero
from jzero import hlo
from jzero.block_files import aligned
from jzero.models.decoder import next_token_loss
from jzero.offload import read_ahead
from jzero.offload.read_ahead import ReadAhead
from jzero.zero import ShardingError

STEPS, ROWS, GROUP = 3, 16, 12_000  # bytes: some layers have more of state, some groups are of many layers
DATA = batches(STEPS, ROWS)
MESHES = {"one device": "dp=1", "dp4 tp2": "dp=4,tp=2"}
STATE: list[dict[str, Any]] = [{"optimizer": "device"}, {"optimizer": "nvme", "host_bytes": 2 * GROUP}]
QUICK = {("one device", 2, 0), ("dp4 tp2", 3, 1)}
CELLS = [
    pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow)
    for cell in [*itertools.product(["one device"], (0, 1, 2, 3), (0, 1)), ("dp4 tp2", 3, 0), ("dp4 tp2", 3, 1)]
]

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")


def setup(
    mesh: str, stage: int, layers_ahead: int = 1, *, layers: int = 4, tx: Any = None, **settings: Any
) -> jzero.Run:
    axes = MESHES[mesh]
    options = {key: settings.pop(key) for key in ("trainable", "precision", "zero") if key in settings}
    return jzero.setup(
        stack(layers, layers_ahead),
        next_token_loss,
        tx or optax.adamw(1e-2),
        jzero.make_mesh(axes, devices(axes)),
        DATA[0],
        stage=stage,
        micro_batches=2,
        clip_norm=0.5,
        offload=jzero.Offload(**({"group_size": GROUP, "min_param_bytes": 0} | settings)),
        **options,
    )


def train(run: jzero.Run, steps: int = STEPS) -> Trained:
    """A training, with an evaluation after the first step."""
    return train_run(run, DATA[:steps], evaluate=DATA[:1])


@pytest.mark.parametrize(("mesh", "stage", "layers_ahead"), CELLS)
def test_they_train_as_parameters_on_the_device_bit_for_bit(mesh, stage, layers_ahead, tmp_path):
    directories = (str(tmp_path / "a"), str(tmp_path / "b"))
    wanted = train(setup(mesh, stage, layers_ahead, optimizer="device"))
    for state in STATE:
        run = setup(mesh, stage, layers_ahead, params="nvme", dir=directories, **state)
        assert run.at_rest_bytes()["params"] == 0
        assert_same_bits(train(run), wanted)


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(jzero.Precision(), id="f32", marks=pytest.mark.slow),
        pytest.param(jzero.Precision(params="bfloat16"), id="bf16"),
    ],
)
def test_updated_on_the_cpu_they_are_as_those_on_the_device_that_are_updated_there(precision, tmp_path):
    settings: dict[str, Any] = {"update": "cpu", "precision": precision}
    run = setup("dp4 tp2", 3, optimizer="nvme", params="nvme", dir=(str(tmp_path),), **settings)
    assert_same_bits(train(run), train(setup("dp4 tp2", 3, optimizer="host", **settings)))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_frozen_parameters_rest_in_files_too(stage, tmp_path):
    """Whole ones as well, as none is updated; a small trained one, as of LoRA, is on the device."""
    some = nnx.All(nnx.Param, nnx.PathContains("up" if stage == 3 else "scale"))
    least = 0 if stage == 3 else 4 * WIDTH + 1
    where = {"optimizer": "host", "params": "nvme", "dir": (str(tmp_path),), "min_param_bytes": least}
    run = setup("dp4 tp2", stage, trainable=some, **where)
    tiers = run.tier_bytes()
    assert tiers["frozen"]["device"] == 0 < tiers["frozen"]["nvme"]
    assert (tiers["params"]["device"] == 0) == (stage == 3)
    assert_same_bits(train(run), train(setup("dp4 tp2", stage, trainable=some, optimizer="device")))


@pytest.mark.slow
def test_a_parameter_that_the_optimizer_takes_whole_is_in_files(tmp_path):
    tx = optax.contrib.muon(1e-2)
    run = setup("dp4 tp2", 3, tx=tx, optimizer="nvme", params="nvme", dir=(str(tmp_path),))
    assert_same_bits(train(run), train(setup("dp4 tp2", 3, tx=tx, optimizer="device")))


def test_a_step_that_is_skipped_changes_nothing(tmp_path):
    run = setup("dp4 tp2", 3, optimizer="nvme", update="cpu", params="nvme", dir=(str(tmp_path),))
    state = run.init()
    before = arrays(state)
    nothing = {**DATA[0], "weights": np.full_like(DATA[0]["weights"], np.nan)}
    state, metrics = run.step(state, nothing)
    assert int(metrics["skipped"]) == 1
    for path, x in arrays(state).items():
        np.testing.assert_array_equal(x, before[path], err_msg=str(path))


# ---- memory ---------------------------------------------------------------------------------------------------------


LAYERS = 48


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("tier"))
    return setup("dp4 tp2", 3, layers=LAYERS, optimizer="nvme", params="nvme", dir=(directory,))


def test_a_program_is_given_tickets_and_reads_a_layer_at_a_time(deep):
    traced = deep.trace()["gradients"]
    given = jax.tree.leaves(traced.in_avals[0][0].params)
    assert {str(x.dtype) for x in given} == {"int32"}
    results = re.findall(r"f32\[([\d,]+)\] = pure_callback", str(traced.jaxpr))
    assert {len(shape.split(",")) for shape in results} == {1, 2}, "without the dim of layers"


def test_the_device_holds_a_few_layers_whatever_the_models_depth(deep):
    memory = hlo.memory(deep.lower()["gradients"].compile())
    assert memory.argument_bytes < 4096, "tickets, the batch and counters"
    on_device = setup("dp4 tp2", 3, layers=LAYERS, optimizer="device")
    there = hlo.memory(on_device.lower()["gradients"].compile())
    assert there.peak_bytes - memory.peak_bytes > 0.8 * on_device.at_rest_bytes()["params"]


def test_host_memory_holds_a_few_layers_whatever_the_models_depth(deep, monkeypatch):
    made = list[int]()
    monkeypatch.setattr(read_ahead, "aligned", lambda nbytes: (made.append(nbytes), aligned(nbytes))[1])
    train(deep, 2)
    params: dict[Any, Any] = flatten_dict(deep.abstract_state.params)
    each = [x.size * x.dtype.itemsize // (LAYERS if path[0] == "layers" else 1) for path, x in params.items()]
    # In shards: what is read ahead, two layers, and more that programs are slow to let go of.
    assert 0 < sum(made) <= 8 * sum(each) < 0.3 * deep.tier_bytes()["params"]["nvme"] * 8


# ---- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "stage", "more", "message"),
    [
        ("dp4 tp2", 1, {}, "offload.params nvme: '.*' .* is updated in shards and rests whole.* take stage 3"),
        ("dp4 tp2", 3, {"zero": jzero.Zero(regather=False)}, "offload.params nvme with zero.regather false"),
        ("dp4 tp2", 3, {"min_param_bytes": 2**30}, "offload.params nvme: no parameter has 1,073,741,824 bytes"),
        (
            "dp4 tp2",
            3,
            {"tx": jzero.averaged(optax.sgd(0.1), 0.9)},
            "average of the parameters.*offload.params host",
        ),
    ],
)
def test_what_cannot_be_is_refused(mesh, stage, more, message, tmp_path):
    with pytest.raises(ShardingError, match=message):
        setup(mesh, stage, params="nvme", dir=(str(tmp_path),), **more)


def test_files_need_a_directory():
    with pytest.raises(ValueError, match=r"offload\.params = nvme needs offload\.dir"):
        jzero.Offload(params="nvme")


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_files_that_are_cut_off_end_the_run_with_one_line(call, tmp_path):
    run = setup("dp4 tp2", 3, optimizer="host", params="nvme", dir=(str(tmp_path),))
    state = run.init()
    for file in tmp_path.glob("*/blocks"):
        file.write_bytes(b"")
    with pytest.raises(jzero.TierError, match="it was truncated; go on from the last checkpoint"):
        jax.block_until_ready(getattr(run, call)(state, DATA[0]))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (jzero.TierError("a bad sector"), "^a bad sector$"),
        (MemoryError(), r"^[\w.]+, layer \d+: cannot be read: MemoryError\(\); go on"),
    ],
    ids=["TierError", "MemoryError"],
)
def test_a_layer_that_one_device_cannot_read_ends_one_call_and_changes_nothing(fault, said, tmp_path, monkeypatch):
    run = setup("dp4 tp2", 3, layers=2, optimizer="host", params="nvme", dir=(str(tmp_path),))
    state, _ = run.step(run.init(), DATA[0])
    before, evaluated = arrays(state), float(run.evaluate(state, DATA[0])["loss"])
    broken = run.stream.reads._readers[5]
    for call in (run.evaluate, run.step):
        with monkeypatch.context() as patch:
            patch.setattr(ReadAhead, "take", failing_at(broken, ReadAhead.take, fault))
            with pytest.raises(jzero.TierError, match=said):
                call(state, DATA[0])
        for path, x in arrays(state).items():
            np.testing.assert_array_equal(x, before[path])
        assert float(run.evaluate(state, DATA[0])["loss"]) == evaluated
    run.step(run.init(), DATA[0])


def test_after_a_step_that_failed_the_run_goes_on_from_a_new_state(tmp_path, monkeypatch):
    run = setup("dp4 tp2", 3, optimizer="nvme", params="nvme", dir=(str(tmp_path),))
    wanted = train(run, 1)
    updater = run.stream.groups[1].updater
    with monkeypatch.context() as patch:
        error = MemoryError("of the test")
        patch.setattr(type(updater), "update", failing_at(updater, type(updater).update, error))
        with pytest.raises(MemoryError, match="of the test"):
            run.step(run.init(), DATA[0])
    assert not run.stream.flow.in_flight
    assert_same_bits(train(run, 1), wanted)


def failing_at(one: Any, method: Any, error: Exception) -> Any:
    """`method`, which raises `error` when it is called of `one`."""

    def failing(self: Any, *given: Any) -> Any:
        if self is one:
            raise error
        return method(self, *given)

    return failing


def test_files_and_memory_go_with_the_run(tmp_path):
    run = setup("one device", 3, layers=2, optimizer="nvme", params="nvme", dir=(str(tmp_path),))
    run.step(run.init(), DATA[0])
    assert len(list(tmp_path.iterdir())) == 2
    assert sum(path.stat().st_size for path in tmp_path.glob("*/blocks")) == run.file_bytes
    del run
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_closed_has_no_files_and_says_so(tmp_path):
    run = setup("one device", 3, layers=2, optimizer="nvme", params="nvme", dir=(str(tmp_path),))
    state, _ = run.step(run.init(), DATA[0])
    for _ in range(2):
        run.close()
        assert not list(tmp_path.iterdir())
    for call in (run.init, *(functools.partial(call, state, DATA[0]) for call in (run.step, run.evaluate))):
        with pytest.raises(jzero.TierError, match="the run is closed"):
            call()
    with pytest.raises(jzero.TierError, match="the run is closed"):
        run.model(state)
    assert not list(tmp_path.iterdir())


def test_a_state_that_a_step_has_overwritten_is_refused(tmp_path):
    run = setup("dp4 tp2", 3, optimizer="host", params="nvme", dir=(str(tmp_path),))
    state = run.init()
    run.step(state, DATA[0])
    with pytest.raises(ValueError, match="overwritten by a later step"):
        run.evaluate(state, DATA[0])


@pytest.mark.slow
def test_a_model_has_its_parameters(tmp_path):
    run = setup("one device", 3, optimizer="host", params="nvme", dir=(str(tmp_path),))
    state = run.init()
    loss, weight = next_token_loss(run.model(state), jax.tree.map(jax.numpy.asarray, DATA[0]))
    np.testing.assert_allclose(float(run.evaluate(state, DATA[0])["loss"]), float(loss) / float(weight), rtol=1e-5)
