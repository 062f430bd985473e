"""The collectives that a traced function writes, before any compiler has seen it.

What jzero sends over the data-parallel axes it writes itself, in regions that are manual over them, so the jaxpr of a
step lists its ZeRO traffic to the byte; it is there a second after `setup`, for any mesh.  `jzero.hlo` reads the same
list off the compiled program, and there the two must be equal.  What the compiler adds, tensor parallelism and the sums
of scalars behind a gradient norm, is seen there alone.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import Mesh

from jzero.hlo import Collective

# Primitive -> (kind, whether the message is the operand times the size of the group).
_KINDS: Mapping[str, tuple[str, bool]] = {
    "all_gather": ("all-gather", True),
    "all_gather_invariant": ("all-gather", True),
    "reduce_scatter": ("reduce-scatter", False),
    "psum": ("all-reduce", False),
    "psum_invariant": ("all-reduce", False),
    "psum2": ("all-reduce", False),
    "pmax": ("all-reduce", False),
    "pmin": ("all-reduce", False),
    "all_to_all": ("all-to-all", False),
    "ppermute": ("collective-permute", False),
}
_DTYPES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "bool": "pred", "complex": "c"}


def collectives(traced: "jax.stages.Traced | Jaxpr", mesh: Mesh) -> list[Collective]:
    """The collectives that one run of a traced function executes, in the order in which they are written.

    Groups of a single device send nothing and are left out, and every branch of a conditional counts, as in `hlo`.
    `message_bytes` are of one device: where a region is manual over all axes, each device's own slice.

    Args:
        traced: what `jax.jit(f).trace(...)` returns, or a jaxpr.
        mesh: the mesh of its regions.

    Raises:
        ValueError: a collective in a loop whose number of turns is not known before it runs.
    """
    jaxpr = traced if isinstance(traced, Jaxpr) else traced.jaxpr.jaxpr
    return list(_walk(jaxpr, mesh, 1, ()))


def _walk(jaxpr: Jaxpr, mesh: Mesh, trips: int, loops: tuple[str, ...]) -> Iterator[Collective]:
    for number, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        if name in _KINDS:
            yield from _read(eqn, mesh, trips, loops)
            continue
        inside = list(_inner(eqn))
        if name == "scan":
            turn = trips * eqn.params["length"], (*loops, f"scan.{len(loops)}.{number}")
        else:
            turn = trips, loops
        for sub in inside:
            found = list(_walk(sub, mesh, *turn))
            if found and name == "while":
                raise ValueError(
                    f"{found[0].kind} over {found[0].axes} in a while loop: how often it runs is not known before; "
                    f"use a scan"
                )
            yield from found


def _read(eqn: JaxprEqn, mesh: Mesh, trips: int, loops: tuple[str, ...]) -> Iterator[Collective]:
    kind, gathers = _KINDS[eqn.primitive.name]
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    named = named if isinstance(named, tuple) else (named,)
    axes = tuple(axis for axis in mesh.axis_names if axis in named and mesh.shape[axis] > 1)
    if not axes:
        return
    group_size = math.prod(mesh.shape[axis] for axis in axes)
    sizes: dict[str, int] = {}
    for aval in (v.aval for v in eqn.invars):
        nbytes = math.prod(aval.shape) * aval.dtype.itemsize * (group_size if gathers else 1)  # pyright: ignore[reportAttributeAccessIssue]
        dtype = _hlo_dtype(aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        sizes[dtype] = sizes.get(dtype, 0) + nbytes
    path = str(eqn.source_info.name_stack)
    for dtype, nbytes in sizes.items():
        yield Collective(eqn.primitive.name, kind, axes, group_size, dtype, nbytes, trips, loops, path)


def _hlo_dtype(dtype: Any) -> str:
    """HLO's name of a dtype, "bf16", "s8"."""
    name = str(dtype)
    word = name.rstrip("0123456789")
    return _DTYPES.get(word, word) + name[len(word) :] if word != "bool" else "pred"


def _inner(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        for sub in value if isinstance(value, tuple | list) else (value,):
            sub = getattr(sub, "jaxpr", sub)
            if isinstance(sub, Jaxpr):
                yield sub
