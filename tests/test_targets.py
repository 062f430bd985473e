"""GPUs that are absent can be named, compiled for, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jzero import targets
from jzero.hlo import collectives, memory, traffic
from jzero.targets import (
    COMPILER_OPTIONS,
    GPUS,
    MAX_DEVICES,
    Gpu,
    TargetError,
    available,
    gpu_devices,
    known_options,
    parse,
)

needs_plugin = pytest.mark.skipif(bool(available()), reason=str(available()))


def test_an_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(TargetError, match=r"unknown target 'h1000' \(did you mean 'h100'\?\): known GPUs are .*b200"):
        gpu_devices("h1000", 8)


@pytest.mark.parametrize("count", [0, -8, 9, 12])
def test_a_count_that_does_not_fill_its_hosts_is_refused(count):
    for target in ("h100", GPUS["h100"]):
        with pytest.raises(TargetError, match=f"'h100': {count} devices do not fill hosts of 8: take 1 to 8, or"):
            gpu_devices(target, count)


def test_more_devices_than_xla_can_count_are_refused_before_any_is_made():
    # 2^32 + 8 would come out as 8.
    for count in (MAX_DEVICES + 8, 2**32 + 8):
        with pytest.raises(TargetError, match=f"{count:,} devices; programs are compiled for at most 1,048,576"):
            gpu_devices("h100", count)


def test_hosts_of_another_size_are_filled_as_well():
    with pytest.raises(TargetError, match=r"'h100:devices_per_host=4': 6 devices do not fill hosts of 4"):
        gpu_devices("h100:devices_per_host=4", 6)


def test_a_gpu_of_ones_own_is_a_known_one_with_other_numbers():
    text = "h100:memory_gb=94.5,nvlink_gb_per_s=0,bf16_tflops=835,cores=114,capability=9.1,devices_per_host=4"
    mine, h100 = parse(text), GPUS["h100"]
    assert parse("h100") is h100
    assert mine.name == text
    assert mine.memory_bytes == 94_500_000_000
    assert (mine.nvlink_gb_per_s, mine.bf16_tflops, mine.cores) == (0, 835, 114)
    assert (mine.capability, mine.devices_per_host) == ((9, 1), 4)
    assert (mine.l2_bytes, mine.nic_gb_per_s, mine.threads_per_core) == (52_428_800, 50, 2048)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Gpu) if f.name not in ("name", "capability")])
def test_every_number_of_a_gpu_can_be_given(field):
    key, value = ("memory_gb", 7 * 10**9) if field == "memory_bytes" else (field, 7)
    made = parse(f"h100:{key}=7")
    assert dataclasses.replace(GPUS["h100"], **{field: value, "name": f"h100:{key}=7"}) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown target '': known GPUs are v100-16"),
        ("h10", r"unknown target 'h10' \(did you mean 'h100'\?\): known GPUs are .*; one with other numbers is "),
        ("mine:memory_gb=94", "unknown target 'mine': known GPUs are"),
        ("h100:", "'h100:': '' is not FIELD=NUMBER, as in memory_gb=94"),
        ("h100:memory_gb", "'memory_gb' is not FIELD=NUMBER"),
        ("h100:memory=94", r"a GPU has no 'memory' \(did you mean 'memory_gb'\?\); it has cores, .*memory_gb, .*"),
        ("h100:memory_bytes=94", r"a GPU has no 'memory_bytes' \(did you mean .*memory_gb"),
        ("h100:name=x", "a GPU has no 'name'"),
        ("h100:memory_gb=94,memory_gb=80", "memory_gb is given twice"),
        ("h100:memory_gb=94,", "'' is not FIELD=NUMBER"),
        ("h100:memory_gb=80GB", "memory_gb=80GB: must be a number above 0, at most 1,000,000"),
        ("h100:memory_gb=0", "memory_gb=0: must be a number above 0"),
        ("h100:memory_gb=nan", "memory_gb=nan: must be a number above 0"),
        ("h100:memory_gb=inf", "memory_gb=inf: must be a number above 0"),
        ("h100:memory_gb=1e7", "memory_gb=1e7: must be a number above 0, at most 1,000,000"),
        ("h100:nic_gb_per_s=-1", "nic_gb_per_s=-1: must be a number from 0"),
        ("h100:cores=13.5", "cores=13.5: must be a whole number above 0"),
        ("h100:l2_bytes=3000000000", "l2_bytes=3000000000: must be a whole number above 0, at most 2,147,483,647"),
        ("h100:devices_per_host=0", "devices_per_host=0: must be a whole number above 0"),
        ("h100:capability=9", "capability=9: must be MAJOR.MINOR, such as 9.0"),
    ],
)  # fmt: skip
def test_a_bad_description_is_refused_in_one_line(text, message):
    with pytest.raises(TargetError, match=message) as error:
        parse(text)
    assert "\n" not in str(error.value)


def test_without_the_plugin_the_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(targets, "_installed", lambda _: False)
    with pytest.raises(TargetError, match=r"target 'h100': .*pip install 'jzero\[aot\]'"):
        gpu_devices("h100", 8)


def test_descriptions_keep_the_figures_that_plans_depend_on():
    h100 = parse("h100")
    assert (h100.memory_bytes, h100.cores, h100.bf16_tflops) == (84_942_979_072, 132, 989)
    assert parse("v100-32").memory_bytes - parse("v100-16").memory_bytes == 17_154_048_000
    assert {g.devices_per_host for g in GPUS.values()} == {8}
    assert all(g.shared_bytes_per_block <= g.shared_bytes_per_core for g in GPUS.values())


@needs_plugin
@pytest.mark.parametrize(("count", "hosts"), [(1, 1), (4, 1), (8, 1), (24, 3)])
def test_devices_stand_in_hosts_of_eight(count, hosts):
    check_hosts(gpu_devices("h100", count), count, hosts)


@needs_plugin
@pytest.mark.parametrize(("count", "hosts"), [(3, 1), (4, 1), (8, 2), (16, 4)])
def test_devices_stand_in_hosts_of_the_gpus_own_size(count, hosts):
    check_hosts(gpu_devices("rtx4090:devices_per_host=4", count), count, hosts)


def check_hosts(devices, count, hosts):
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


def text_of(target):
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=SingleDeviceSharding(gpu_devices(target, 1)[0]))
    return jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(x).compile(compiler_options=COMPILER_OPTIONS).as_text()


@needs_plugin
def test_a_gpu_of_ones_own_compiles_as_what_its_numbers_say():
    mine = parse("h100:memory_gb=94,nvlink_gb_per_s=300")
    assert gpu_devices(mine, 2)[1].device_kind == mine.name
    # Its name says nothing to the compiler.
    assert len({text_of(target) for target in ("h100:bf16_tflops=835", "h100")}) == 1
    assert gpu_devices(dataclasses.replace(mine, name='of "mine"\\'), 1)[0].device_kind == 'of "mine"\\'


KNOWN = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_all_gather_combine_threshold_bytes": 1 << 20}
UNKNOWN = {"xla_gpu_of_another_version": True, "xla_gpu_enable_latency_hiding_schedule": 1}


@needs_plugin
def test_options_that_the_compiler_does_not_know_are_left_out():
    assert known_options({**UNKNOWN, **KNOWN}) == KNOWN
    assert known_options({}) == {}
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(gpu_devices("h100", 1)[0]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):  # what they would do
        jax.jit(lambda x: x + 1).lower(x).compile(compiler_options=UNKNOWN)


def test_a_device_that_is_here_is_asked_in_the_same_way():
    assert known_options({**UNKNOWN, **KNOWN}, jax.devices("cpu")[0]) == KNOWN


def test_a_known_option_with_a_bad_value_is_not_left_out():
    with pytest.raises(
        TargetError, match=r"compiler option xla_gpu_enable_latency_hiding_scheduler=maybe: .*not a valid"
    ):
        known_options({"xla_gpu_enable_latency_hiding_scheduler": "maybe"}, jax.devices("cpu")[0])


def test_each_option_is_tried_once(monkeypatch):
    cpu = jax.devices("cpu")[0]
    known_options(KNOWN, cpu)
    monkeypatch.setattr(jax, "jit", None)
    assert known_options(KNOWN, cpu) == KNOWN
