"""A loop that reads nothing does not fill the threads of CPU devices with programs that wait for each other."""

import jax
import optax
import pytest
from tiny_decoder import batches, decoder

import jzero
from jzero import targets
from jzero.models.decoder import next_token_loss
from jzero.pace import IN_FLIGHT, Pace


class Result:
    """Of a program that ends when somebody waits for it."""

    ended = False

    def block_until_ready(self):
        self.ended = True
        return self


def ended(mesh, count=6):
    pace, results = Pace(mesh), [Result() for _ in range(count)]
    for result in results:
        pace.dispatched({"loss": result})
    return [result.ended for result in results]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_all_but_the_last_few_programs_of_cpu_devices_have_ended():
    assert ended(jzero.make_mesh("dp=-1")) == [True] * (6 - IN_FLIGHT) + [False] * IN_FLIGHT


@pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))
def test_nobody_waits_for_gpus_nor_for_one_device():
    assert not any(ended(jzero.make_mesh("dp=8", targets.gpu_devices("h100", 8))))
    assert not any(ended(jzero.make_mesh("dp=1", jax.devices()[:1])))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_steps_whose_metrics_nobody_reads_are_waited_for():
    data = batches(1, 2 * jax.device_count())
    run = jzero.setup(decoder(layers=1), next_token_loss, optax.adamw(1e-3), "dp=-1", data[0])
    state, metrics = run.init(), []
    for _ in range(6):
        state, found = run.step(state, data[0])
        metrics.append(found)
        assert all(found["loss"].is_ready() for found in metrics[: -IN_FLIGHT or None])
