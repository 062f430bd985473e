"""Every spelling of replica groups that XLA prints gives the same groups; what cannot be read is an error."""

import numpy as np
import pytest

from jzero.replica_groups import replica_groups, source_target_pairs

CUBE = {"node": 2, "dp": 2, "tp": 2}


def along(*axes: str) -> set[frozenset[int]]:
    """Groups of devices of the cube that differ along `axes` alone."""
    names = list(CUBE)
    positions = np.arange(8).reshape(*CUBE.values())
    spanned = [names.index(axis) for axis in axes]
    others = [d for d in range(3) if d not in spanned]
    groups = positions.transpose(others + spanned).reshape(-1, 2 ** len(axes))
    return {frozenset(group) for group in groups.tolist()}


@pytest.mark.parametrize(
    ("spelled", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tp",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("dp",)),
        ("{{4,0},{1,5},{2,6},{3,7}}", ("node",)),
        ("{{0,2,4,6},{1,3,5,7}}", ("node", "dp")),
        ("{}", ("node", "dp", "tp")),
        ("{{0,1,2,3,4,5,6,7}}", ("node", "dp", "tp")),
        ("[4,2]<=[8]", ("tp",)),
        ("[1,8]<=[8]", ("node", "dp", "tp")),
        ("[2,4]<=[8]", ("dp", "tp")),
        ("[4,2]<=[2,4]T(1,0)", ("node",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("dp",)),
        ("[2,4]<=[4,2]T(1,0)", ("node", "dp")),
        ("mesh['node'=2,'dp'=2,'tp'=2] {'dp'}", ("dp",)),
        ("mesh['node'=2,'dp'=2,'tp'=2] {'node','tp'}", ("node", "tp")),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("dp", "tp")),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("node",)),
        ("mesh['axis_0'=8] {'axis_0':(4)2}", ("tp",)),
        ("mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(4)2}", ("node", "tp")),
        ("mesh[a=4,b=2] {b}", ("tp",)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("node",)),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("node",)),
    ],
)
def test_every_spelling_gives_the_groups(spelled, axes):
    groups = replica_groups(f"channel_id=1, replica_groups={spelled}, dimensions={{0}}", 8)
    assert {frozenset(group) for group in groups.tolist()} == along(*axes)


def test_members_keep_the_order_that_is_written():
    assert replica_groups("replica_groups={{2,0},{1,3}}, dimensions={0}", 4).tolist() == [[2, 0], [1, 3]]


def test_no_groups_at_all_are_one_group_of_all():
    assert replica_groups("channel_id=1, dimensions={0}", 4).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "spelled",
    [
        "<<0,1>,<2,3>>",
        "[4,2]<=[8]S(0)",
        "[4,2]<=[9]",
        "{{0,1},{2,3}}",
        "{{0,1},{2,3},{4,5,6,7}}",
        "{{0,1},{2,3},{4,5},{6,6}}",
        "@cube{'dp'}",
        "mesh['a'=8] {'b'}",
        "mesh['a'=8], device_ids=(?) {'a'}",
        "mesh['a'=8] {'a':2}",
        "maximal_mesh[device_id=0] {}",
    ],
)
def test_groups_that_cannot_be_read_are_an_error_that_shows_them(spelled):
    with pytest.raises(ValueError, match="replica groups") as error:
        replica_groups(f"replica_groups={spelled}, dimensions={{0}}", 8)
    assert spelled in str(error.value)


def test_pairs_of_a_permute_are_rows_of_from_and_to():
    pairs = source_target_pairs("channel_id=1, source_target_pairs={{0,2},{2,0},{1, 3}}, metadata={}", 4)
    assert pairs.tolist() == [[0, 2], [2, 0], [1, 3]]
    assert source_target_pairs("source_target_pairs={}", 4).shape == (0, 2)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ("channel_id=1", "no source_target_pairs"),
        ("source_target_pairs=[1,0]", "no source_target_pairs"),
        ("source_target_pairs={{0,7},{7,0}}", "reaches device 7, the mesh has 4"),
    ],
)
def test_pairs_that_cannot_be_read_are_an_error(attributes, message):
    with pytest.raises(ValueError, match=message):
        source_target_pairs(attributes, 4)
