"""A run that is killed at any moment, of a save above all, goes on from its last complete step and ends as if nothing
had happened.

Ten kills; JZERO_KILLS=50 for more.
"""

import os
from collections import Counter

import numpy as np
import pytest
from kills import EVERY, STEPS_PER_KILL, Sessions, kill_again_and_again
from saved_arrays import arrays, losses, names

KILLS = int(os.environ.get("JZERO_KILLS", "10"))


@pytest.mark.slow
def test_kills_change_no_bit_of_a_run(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(" ".join(np.random.default_rng(0).choice(["zero", "shards", "gather ", "scatter\n"], 3000)))
    steps = KILLS * STEPS_PER_KILL
    whole, killed = (Sessions(tmp_path / name, corpus, steps) for name in ("whole", "killed"))
    whole.finish("--checkpoint.every", str(steps))

    kills = kill_again_and_again(killed, KILLS, seed=0)
    said = killed.finish()

    for kill in kills:
        print(kill)
    newest, lost = 0, []
    for kill, after in zip(kills, [*(kill.resumed for kill in kills[1:]), killed.resumed()], strict=True):
        assert kill.complete or newest == 0, "a complete step is gone"
        newest = max([newest, *kill.complete])
        assert kill.complete[-1:] == ([newest] if newest else [])
        if after is not None:  # None: the next session, too, was killed before it had read anything
            assert after == newest
            lost.append(kill.trained - after)
        assert len(kill.complete) <= 3
        assert len(kill.unfinished) <= 2, "what kills leave behind piles up"
    # While a save is written, training goes on up to the next one, and what is dispatched by then is trained.
    assert max(lost) <= 2 * EVERY + 2
    print("hit", dict(Counter(kill.hit for kill in kills)))
    print("lost steps", sorted(lost), "of", steps)

    assert "warning" not in said
    assert names(killed.checkpoints) == sorted([str(steps - EVERY), str(steps)])
    assert [step for step, *_ in losses(killed.run_dir)] == list(range(1, steps + 1))
    assert losses(killed.run_dir) == losses(whole.run_dir)
    assert [line["step"] for line in killed.lines() if "eval_loss" in line] == [0, steps]
    expected, got = arrays(whole.run_dir, steps), arrays(killed.run_dir, steps)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)
