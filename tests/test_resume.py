"""A run that was stopped, killed or moved goes on as if nothing had happened."""

import jax
import numpy as np
import pytest
from saved_arrays import arrays, losses
from tiny_run import TINY, batch_for_these_devices

from jzero import train
from jzero.journal import Journal

pytestmark = pytest.mark.filterwarnings("ignore:Failed to open:UserWarning")
STEPS = 50


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    words = np.random.default_rng(0).choice(["zero", "shards", "state", "gather ", "scatter\n"], 6000)
    path.write_text(" ".join(words))
    return path


def flags(corpus, run_dir, *more):
    common = ["--run.dir", str(run_dir), "--data.path", str(corpus), "--run.cache_dir", "none", *TINY]
    common += ["--log.every", "1", "--log.eval_every", "1000", "--log.tensorboard", "false"]
    return [*common, "--batch_size", batch_for_these_devices(), *more]


class Crash(BaseException):
    """What nobody catches."""


def crash_at(monkeypatch, step):
    taken = Journal.trained

    def trained(self, steps):
        taken(self, steps)
        if self.progress.step >= step:
            raise Crash

    monkeypatch.setattr(Journal, "trained", trained)


def test_two_crashes_change_no_bit_of_a_run(corpus, tmp_path, monkeypatch):
    """With dropout, four microbatches, a schedule, an average of the weights and epochs that end under way."""
    more = ["--steps", str(STEPS), "--checkpoint.every", "10", "--stage", "3", "--micro_batch", "1"]
    more += ["--batch_size", str(4 * jax.device_count()), "--model.dropout", "0.1", "--optim.ema", "0.9"]
    assert train.main(flags(corpus, tmp_path / "whole", *more)) == 0
    for step in (23, 38):
        crash_at(monkeypatch, step)
        with pytest.raises(Crash):
            train.main(flags(corpus, tmp_path / "parts", *more))
        monkeypatch.undo()
    assert train.main(flags(corpus, tmp_path / "parts", *more)) == 0

    assert [step for step, *_ in losses(tmp_path / "whole")] == list(range(1, STEPS + 1))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = arrays(tmp_path / "whole", STEPS), arrays(tmp_path / "parts", STEPS)
    assert whole.keys() == parts.keys()
    for name, x in whole.items():
        np.testing.assert_array_equal(parts[name], x, err_msg=name)
