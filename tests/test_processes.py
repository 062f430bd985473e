"""Each process reads its own rows of a batch and puts them where its devices want them."""

import jax
import numpy as np
import pytest
from processes import free_address, spawn, wait

import jzero
from jzero import targets
from jzero.mesh import process_rows

PROGRAM = """
import sys
import jax, numpy as np, optax
import jzero
from jzero import distributed
from jzero.models.decoder import next_token_loss
from tiny_decoder import decoder, batches

address, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 4)
distributed.start(address, processes=2, process=process)
(whole,) = batches(1, 16)
tokens, across = whole["tokens"], jax.devices()
for devices, axes in [(across, "dp=4,tp=2"), (across[::2] + across[1::2], "dp=8"), (across[::4] + across[1::4]
                      + across[2::4] + across[3::4], "dp=4,tp=2")]:
    mesh = jzero.make_mesh(axes, devices)
    run = jzero.setup(decoder(), next_token_loss, optax.sgd(1.0), mesh, whole, micro_batches=2)
    rows = jzero.process_rows(mesh, 16)
    placed = run.put({name: x[rows] for name, x in whole.items()})
    assert placed["tokens"].shape == tokens.shape, placed["tokens"].shape
    for shard in placed["tokens"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), tokens[shard.index])
    try:
        run.put({"tokens": tokens[:3]})
    except ValueError as error:
        print("refused:", error)
    print("rows:", *rows)
"""


def test_two_processes_hold_the_rows_they_read():
    address = free_address()
    ended = wait([spawn(["-c", PROGRAM, address, str(process)]) for process in range(2)], 200)
    assert [process.status for process in ended] == [0, 0], [process.err[-2000:] for process in ended]
    read = [[line.split()[1:] for line in process.out.splitlines() if line.startswith("rows:")] for process in ended]
    first, second = ([list(map(int, rows)) for rows in process] for process in read)
    assert [sorted(a + b) for a, b in zip(first[:2], second[:2], strict=True)] == [list(range(16))] * 2
    assert first[1] == [0, 1, 2, 3, 8, 9, 10, 11]  # devices dealt out in turn: two blocks of rows
    assert first[2] == second[2] == list(range(16))  # they differ in tp alone
    assert ended[0].out.count("refused: a batch of 6 cannot be split") == 2
    assert ended[0].out.count("refused: a batch of 3 cannot be split") == 1


@pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))
@pytest.mark.parametrize("axes", ["dp=32", "node=4,dp=8", "dp=16,tp=2", "dp=2,tp=16"])
def test_the_rows_of_all_processes_make_up_the_batch(axes):
    mesh = jzero.make_mesh(axes, targets.gpu_devices("h100", 32))
    parts = [process_rows(mesh, 64, process).tolist() for process in range(4)]
    assert sorted({row for part in parts for row in part}) == list(range(64))
    assert {len(part) for part in parts} == {32 if "tp=16" in axes else 16}
    assert (parts[0] == parts[1]) == ("tp=16" in axes)


def test_one_process_holds_the_whole_batch():
    mesh = jzero.make_mesh(None)
    np.testing.assert_array_equal(process_rows(mesh, 2 * jax.device_count()), np.arange(2 * jax.device_count()))
    assert not len(process_rows(mesh, 2 * jax.device_count(), process=1))
