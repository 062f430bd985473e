"""The device mesh: three named axes, (node, dp, tp), always in this order and always all three.

`axis` is a word for the mesh, `dim` for a tensor.  The batch is split over the data-parallel axes (node, dp); `tp`
splits the tensors of one layer and belongs inside a node.  An axis that is left out has size 1.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

NODE = "node"
DP = "dp"
TP = "tp"
AXES = (NODE, DP, TP)
DATA_AXES = (NODE, DP)


def parse(text: str) -> dict[str, int]:
    """Axis sizes from text such as ``"node=2,dp=4,tp=2"``; one axis may be ``-1``, "what is left".

    Raises:
        ValueError: an unknown axis, a size that is neither positive nor -1, a repeated axis, two -1.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, size = (s.strip() for s in part.partition("="))
        if not name or not re.fullmatch("-?[0-9]+", size):
            raise ValueError(f"mesh {text!r}: {part!r} is not AXIS=SIZE, as in 'node=2,dp=4,tp=2'")
        if name in sizes:
            raise ValueError(f"mesh {text!r}: axis {name!r} is given twice")
        sizes[name] = int(size)
    _check_axes(sizes, repr(text))
    return sizes


def sizes_on(sizes: Mapping[str, int], device_count: int) -> dict[str, int]:
    """All three axis sizes on `device_count` devices: a -1 is resolved, an axis left out is 1.

    With no axis given at all, `dp` takes every device.

    Raises:
        ValueError: the product is not the device count, or -1 cannot be resolved.
    """
    _check_axes(sizes, str(dict(sizes)))
    full = {axis: sizes.get(axis, 1) for axis in AXES} if sizes else {NODE: 1, DP: -1, TP: 1}
    known = int(np.prod([n for n in full.values() if n > 0]))
    if -1 in full.values() and device_count % known == 0:
        full = {axis: device_count // known if n == -1 else n for axis, n in full.items()}
    product = " x ".join(f"{axis}={n}" for axis, n in full.items())
    if int(np.prod(list(full.values()))) != device_count:
        raise ValueError(
            f"mesh {product} does not make {device_count} devices: the axis sizes must multiply to the device count "
            f"(one of them may be -1, for what is left)"
        )
    return full


def check_tp_inside_hosts(given: Mapping[str, int], sizes: Mapping[str, int], hosts: Sequence[str]) -> None:
    """Refuses tensor parallelism between hosts, unless every axis is written out: then it is meant.

    Args:
        given: axis sizes as written.
        sizes: of all three axes.
        hosts: of each device, in the order in which they fill the mesh; empty: all are of one host.

    Raises:
        ValueError: a tp group has devices of more than one host.
    """
    tp = sizes[TP]
    groups = [set(hosts[i : i + tp]) for i in range(0, len(hosts), tp)]
    if all(len(group) == 1 for group in groups) or (given.keys() == set(AXES) and -1 not in given.values()):
        return
    counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    shown = ", ".join(f"{count} on {host}" for host, count in list(counts.items())[:4]) + ", ..." * (len(counts) > 4)
    raise ValueError(
        f"mesh axis tp = {tp} would lie across hosts (devices: {shown}), and belongs inside one, where links are fast: "
        f"take a tp that divides {math.gcd(*counts.values())}, or write out all axes if it is meant, "
        f"{','.join(f'{axis}={sizes[axis]}' for axis in AXES)}"
    )


def make_mesh(axes: str | Mapping[str, int] | None = None, devices: Sequence[Any] | np.ndarray | None = None) -> Mesh:
    """A (node, dp, tp) mesh over `devices` (default: all), every axis Auto.

    `make_mesh` of JAX makes Explicit axes by default and Flax wants Auto ones, so the types are always named.

    Args:
        axes: ``"dp=4,tp=2"``, ``{"dp": 4, "tp": 2}`` or None (dp takes every device).
        devices: `jax.Device`s in the order in which they fill the mesh, `tp` fastest.
    """
    devices = np.asarray(jax.devices() if devices is None else devices).ravel()
    sizes = sizes_on(parse(axes) if isinstance(axes, str) else axes or {}, devices.size)
    return Mesh(devices.reshape([sizes[a] for a in AXES]), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def as_mesh(mesh: Mesh | str | Mapping[str, int] | None) -> Mesh:
    """`mesh` itself when it is one that jzero can use, else the mesh it describes.

    Raises:
        ValueError: a Mesh with other axes than (node, dp, tp), or with axes that are not Auto.
    """
    if not isinstance(mesh, Mesh):
        return make_mesh(mesh)
    if mesh.axis_names != AXES:
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names}, jzero needs {AXES}: use jzero.make_mesh('dp=4,tp=2')"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"the mesh has axis types {mesh.axis_types}, jzero needs Auto ones: use jzero.make_mesh")
    return mesh


def data_size(mesh: Mesh) -> int:
    """How many devices the batch is split over: node x dp."""
    return mesh.shape[NODE] * mesh.shape[DP]


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """How the arrays of a batch lie on the mesh: their first dim split over node and dp."""
    return NamedSharding(mesh, P(DATA_AXES))


def process_rows(mesh: Mesh, batch_size: int, process: int | None = None) -> np.ndarray:
    """Which rows of a batch the devices of one process hold, ascending: what it has to read.

    Processes that differ in tp alone hold the same rows.

    Args:
        batch_size: rows of a whole batch; a multiple of the data-parallel devices.
        process: its index; None for the process that asks.

    Returns:
        int64[rows]; all of them where there is one process.
    """
    process = jax.process_index() if process is None else process
    held = np.zeros(batch_size, bool)
    for device, (rows, *_) in batch_sharding(mesh).devices_indices_map((batch_size,)).items():
        if device.process_index == process:
            held[rows] = True
    return np.flatnonzero(held)


def _check_axes(sizes: Mapping[str, int], shown: str) -> None:
    for name, size in sizes.items():
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, 1, 0.3)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"mesh {shown}: unknown axis {name!r}{hint}; the axes are {', '.join(AXES)}")
        if size < 1 and size != -1:
            raise ValueError(f"mesh {shown}: {name}={size} must be at least 1, or -1 for what is left")
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh {shown}: only one axis can be -1")
