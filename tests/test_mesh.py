"""A mesh is (node, dp, tp), whatever of it is named; what cannot be a mesh is an error that says what can."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jzero.mesh import AXES, as_mesh, data_size, make_mesh, parse, sizes_on


def devices(count: int) -> list[jax.Device]:
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices, here are {jax.device_count()}")
    return jax.devices()[:count]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("node=2,dp=4,tp=2", {"node": 2, "dp": 4, "tp": 2}),
        ("tp=2,dp=4", {"tp": 2, "dp": 4}),
        (" dp = 4 , tp = 2 ", {"dp": 4, "tp": 2}),
        ("dp=-1", {"dp": -1}),
        ("dp=8,", {"dp": 8}),
        ("", {}),
    ],
)
def test_text_names_sizes(text, sizes):
    assert parse(text) == sizes


GARBAGE = ["dp", "dp=", "=8", "dp=four", "dp=4.0", "dp=--4", "dp=1e1", "dp=4=2", "dp=²", "dp:8", "8", "dp=4 tp=2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ddp=8", r"unknown axis 'ddp' \(did you mean 'dp'\?\); the axes are node, dp, tp"),
        ("nodes=2,dp=4", r"unknown axis 'nodes' \(did you mean 'node'\?\)"),
        ("xxxxxxxx=8", r"unknown axis 'xxxxxxxx'; the axes are"),
        ("DP=8", "unknown axis 'DP'"),
        ("dp=0", r"dp=0 must be at least 1, or -1 for what is left"),
        ("dp=-2", r"dp=-2 must be at least 1"),
        ("dp=-1,tp=-1", "only one axis can be -1"),
        ("dp=4,dp=2", "axis 'dp' is given twice"),
        *[(text, r"is not AXIS=SIZE, as in 'node=2,dp=4,tp=2'") for text in GARBAGE],
    ],
)
def test_text_that_names_no_mesh_is_an_error_that_shows_it(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "device_count", "node_dp_tp"),
    [
        ({"node": 2, "dp": 2, "tp": 2}, 8, (2, 2, 2)),
        ({"dp": 8}, 8, (1, 8, 1)),  # an axis left out is 1
        ({"tp": 8}, 8, (1, 1, 8)),
        ({"dp": -1}, 8, (1, 8, 1)),
        ({"dp": -1, "tp": 2}, 8, (1, 4, 2)),
        ({"node": -1, "dp": 2}, 4096, (2048, 2, 1)),
        ({"dp": 8, "tp": -1}, 8, (1, 8, 1)),  # what is left may be 1
        ({}, 8, (1, 8, 1)),  # dp takes every device
        ({}, 1, (1, 1, 1)),
    ],
)
def test_sizes_are_filled_up_to_the_device_count(sizes, device_count, node_dp_tp):
    assert sizes_on(sizes, device_count) == dict(zip(AXES, node_dp_tp, strict=True))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 4}, r"node=1 x dp=4 x tp=1 does not make 8 devices: .*one of them may be -1"),
        ({"dp": 4, "tp": 4}, r"node=1 x dp=4 x tp=4 does not make 8 devices"),
        ({"dp": -1, "tp": 3}, r"node=1 x dp=-1 x tp=3 does not make 8 devices"),
        ({"dp": -1, "tp": 16}, r"dp=-1 x tp=16 does not make 8 devices"),
        ({"dp": -1, "tp": -1}, r"only one axis can be -1"),
        ({"dp": 0}, r"dp=0 must be at least 1"),
        ({"pp": 2}, r"unknown axis 'pp' \(did you mean '(dp|tp)'\?\)"),
    ],
)
def test_sizes_that_do_not_make_the_device_count_are_an_error_that_shows_the_product(sizes, message):
    with pytest.raises(ValueError, match=message):
        sizes_on(sizes, 8)


def test_every_axis_is_there_and_auto():
    mesh = make_mesh("dp=2,tp=2", devices(4))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"node": 1, "dp": 2, "tp": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert data_size(mesh) == 2


def test_devices_fill_the_mesh_in_their_order_with_tp_fastest():
    backwards = devices(8)[::-1]
    mesh = make_mesh({"node": 2, "dp": 2, "tp": 2}, backwards)
    assert list(mesh.devices.flat) == backwards
    assert list(mesh.devices[0, 0]) == backwards[:2]
    assert make_mesh({"node": 2, "dp": 2, "tp": 2}, np.array(backwards).reshape(2, 4)) == mesh
    assert data_size(mesh) == 4


def test_with_nothing_said_dp_takes_every_device():
    assert make_mesh() == as_mesh(None) == as_mesh("dp=-1") == as_mesh({"dp": jax.device_count()})
    assert make_mesh().shape["dp"] == jax.device_count()


def test_a_mesh_that_fits_is_taken_as_it_is():
    mesh = make_mesh("tp=2", devices(2))
    assert as_mesh(mesh) is mesh


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        (("dp", "node", "tp"), AxisType.Auto, r"axes \('dp', 'node', 'tp'\), jzero needs \('node', "),
        (("data", "fsdp", "tp"), AxisType.Auto, r"axes \('data', 'fsdp', 'tp'\)"),
        (AXES, AxisType.Explicit, r"axis types .*Explicit.*jzero needs Auto ones: use jzero.make_mesh"),
    ],
)
def test_a_mesh_of_another_kind_is_refused_with_the_remedy(names, kind, message):
    mesh = Mesh(np.array(devices(4)).reshape(1, 2, 2), names, axis_types=(kind,) * 3)
    with pytest.raises(ValueError, match=message):
        as_mesh(mesh)
