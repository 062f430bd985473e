"""GPUs that are absent can be named, compiled for, and nothing else."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import targets
from jzero.hlo import collectives, memory, traffic
from jzero.targets import COMPILER_OPTIONS, GPUS, TargetError, available, gpu, gpu_devices

needs_plugin = pytest.mark.skipif(bool(available()), reason=str(available()))


def test_an_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(TargetError, match=r"unknown target 'h1000': known GPUs are .*a100, h100, h200, b200"):
        gpu_devices("h1000", 8)


@pytest.mark.parametrize("count", [0, -8, 9, 12])
def test_a_count_that_does_not_fill_its_hosts_is_refused(count):
    with pytest.raises(TargetError, match=f"target 'h100': {count} devices; 1 to 8, or a multiple of 8"):
        gpu_devices("h100", count)


def test_without_the_plugin_the_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(targets, "_installed", lambda _: False)
    with pytest.raises(TargetError, match=r"target 'h100': .*pip install 'jzero\[aot\]'"):
        gpu_devices("h100", 8)


def test_descriptions_keep_the_figures_that_plans_depend_on():
    assert (gpu("h100").memory_bytes, gpu("h100").cores, gpu("h100").bf16_tflops) == (84_942_979_072, 132, 989)
    assert gpu("v100-32").memory_bytes - gpu("v100-16").memory_bytes == 17_154_048_000
    assert all(g.shared_bytes_per_block <= g.shared_bytes_per_core for g in GPUS.values())


@needs_plugin
@pytest.mark.parametrize(("count", "hosts"), [(1, 1), (4, 1), (8, 1), (24, 3)])
def test_devices_stand_in_hosts_of_eight(count, hosts):
    devices = gpu_devices("h100", count)
    assert devices.shape == (count,)
    assert [d.id for d in devices] == list(range(count))
    assert {d.process_index for d in devices} == set(range(hosts))
    assert {d.platform for d in devices} == {"gpu"}


@needs_plugin
@pytest.mark.parametrize("target", GPUS)
def test_every_gpu_of_the_table_compiles_a_sharded_program(target):
    devices = gpu_devices(target, 8)
    assert devices[0].device_kind == GPUS[target].name
    mesh = Mesh(devices, ("dp",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("dp")), NamedSharding(mesh, P())
    f = jax.jit(lambda x, w: (x @ w).sum(0), in_shardings=(rows, whole), out_shardings=whole)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 256), (256, 512)))
    compiled = f.lower(x, w).compile(compiler_options=COMPILER_OPTIONS)
    assert traffic(collectives(compiled, mesh)) == {("all-reduce", ("dp",), "f32"): 512 * 4}
    assert memory(compiled).argument_bytes == (64 // 8 * 256 + 256 * 512) * 4
