"""What XLA's GPU compiler is asked for, by mesh and by what layers gather."""

import jax
import pytest

import jzero
from jzero import comm, targets

needs_gpu_compiler = pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))

HIDING = "xla_gpu_enable_latency_hiding_scheduler"
GATHERS = "xla_gpu_all_gather_combine_threshold_bytes"
AT_ONCE = comm._AT_ONCE
(TWO_TURNS,) = comm._WHERE_LAYERS_GATHER
(COPIES,) = comm._WHERE_LAYERS_FETCH


def options(devices: int, layer_bytes: int, tp: int = 1, **settings):
    mesh = jzero.make_mesh(f"dp={devices // tp},tp={tp}", targets.gpu_devices("h100", devices))
    return jzero.Comm(**settings).compiler_options(mesh, layer_bytes)


@needs_gpu_compiler
def test_a_layer_s_gathers_are_one_and_loops_take_two_turns_where_layers_gather():
    assert options(8, 1000) == {HIDING: True, GATHERS: 1000, TWO_TURNS: True}
    assert options(8, 0) == {HIDING: True}
    assert options(8, 1000, gather_bucket_bytes=7)[GATHERS] == 7


@needs_gpu_compiler
def test_across_hosts_and_beside_tensor_parallelism_more_than_one_collective_may_be_under_way():
    assert options(16, 0) == options(16, 0, tp=2) == {HIDING: True, AT_ONCE: 4}
    assert options(8, 0, tp=2) == {HIDING: True, AT_ONCE: 2}


@needs_gpu_compiler
def test_where_layers_fetch_from_the_host_many_copies_may_be_under_way():
    mesh = jzero.make_mesh("dp=8", targets.gpu_devices("h100", 8))
    assert jzero.Comm().compiler_options(mesh, layers_fetch=True) == {HIDING: True, COPIES: 64}


@needs_gpu_compiler
def test_without_overlap_nothing_is_asked_for_its_sake():
    assert options(16, 1000, overlap=False) == {HIDING: False, GATHERS: 1000}


@needs_gpu_compiler
def test_what_the_installed_compiler_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setattr(comm, "_ACROSS_HOSTS", {"xla_gpu_of_another_year": 4})
    assert options(16, 0) == {HIDING: True}


def test_other_compilers_are_asked_for_nothing():
    mesh = jzero.make_mesh("dp=1", jax.devices()[:1])
    assert jzero.Comm().compiler_options(mesh, 1000) == {}
    with pytest.raises(ValueError, match=r"comm\.\*_bucket_bytes: .* not on cpu"):
        jzero.Comm(gather_bucket_bytes=1).compiler_options(mesh)
