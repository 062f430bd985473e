"""A compiled program lists its own collectives; this file reads the list.

What a training step sends is not what its source says: XLA combines, splits, hoists and widens collectives. The only
witness is the compiled program, so every claim about traffic is read from there, on any compiled JAX function::

    compiled = jax.jit(f, in_shardings=...).lower(x).compile()
    for c in collectives(compiled, mesh):
        print(c.kind, c.axes, c.dtype, c.message_bytes, "x", c.trips)

Two conventions of counting exist and are mixed up everywhere; here each number says which one it is. `message_bytes` is
the full tensor: what a gather returns, what a scatter takes. `wire_bytes` is what one device sends with a ring:
(N-1)/N of the message for a gather, scatter or all-to-all, 2(N-1)/N for an all-reduce, all of it for a permute.

Both are counts of one device. A program is the same on all devices, and its numbers for devices are positions in the
flattened mesh it was compiled for, never `device.id`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero.hlo_shapes import HloError, arrays, tuple_parts
from jzero.hlo_text import KINDS, Instruction, Module, Placed
from jzero.phases import Phase, Phases
from jzero.replica_groups import replica_groups, source_target_pairs

__all__ = ["KINDS", "Collective", "HloError", "Memory", "collectives", "memory", "traffic"]


@dataclass(frozen=True)
class Collective:
    """One collective of a program, once per dtype of its operands (XLA combines tensors into one operation).

    Attributes:
        name: the HLO instruction's name.
        kind: one of `KINDS`.
        axes: the mesh axes along which members of one group differ, in mesh order; never empty.
        group_size: devices that take part together; for a permute, the product of the sizes of `axes`.
        dtype: HLO's name, "f32", "bf16", "s8"; what is on the wire, which may be wider than the source asked for.
        message_bytes: the full tensor of one execution on one device: output of a gather, input of a reduce-scatter,
            tensor of an all-reduce, all-to-all or permute; all operands of this dtype together.
        trips: executions in one run of the program: the product of the trip counts of the enclosing loops.
        loops: names of the enclosing while bodies, outermost first; () at top level.
        op_name: the path in the traced function, as in "jit(step)/while/body/all_gather"; "" where XLA kept none.
        matmuls: matrix multiplications that the schedule puts between its start and its done, in one execution: what it
            can hide under. 0 where it is not asynchronous.
        phase: the part of a training step, as `phases.Phases` tells it; "forward" in a program without derivatives.
        layer_turns: turns of the loop over layers in which it stands, the innermost loop of a forward or backward pass;
            0 beside such loops.  XLA may take a turn out of a loop, and may have two layers in one turn.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    message_bytes: int
    trips: int
    loops: tuple[str, ...]
    op_name: str
    matmuls: int = 0
    phase: Phase = "forward"
    layer_turns: int = 0

    @property
    def total_bytes(self) -> int:
        """Message bytes of all trips."""
        return self.message_bytes * self.trips

    @property
    def wire_bytes(self) -> int:
        """Bytes one device sends in all trips with a ring algorithm, rounded up to whole bytes."""
        if self.kind == "collective-permute":
            return self.total_bytes
        passes = 2 if self.kind == "all-reduce" else 1
        return -(-self.total_bytes * passes * (self.group_size - 1) // self.group_size)


@dataclass(frozen=True)
class Memory:
    """Bytes one device needs to run a program.

    Attributes:
        argument_bytes, output_bytes: arrays that come in and go out; alias_bytes of them are the same memory (donated).
        temp_bytes: everything else that is allocated while it runs.
        peak_bytes: the most a device holds at once, arguments, outputs and temporaries together.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int


def collectives(program: "jax.stages.Compiled | str", mesh: Mesh) -> list[Collective]:
    """The collectives of one run of `program`, in program order.

    Asynchronous pairs count once. Every branch of a conditional counts, so with conditionals the sum is an upper bound.
    Groups of a single device send nothing and are left out.

    Args:
        program: a compiled function, or the HLO text of one.
        mesh: the mesh it was compiled for; its devices are numbered in flattened order.

    Raises:
        HloError: something in the program cannot be counted exactly: an unknown kind of collective or spelling of
            replica groups, a loop round a collective whose trip count XLA does not know, a mesh that is not the
            program's. The message names the instruction. Nothing is left out in silence.
    """
    if not isinstance(program, str):
        _check_mesh(program, mesh)
    text = program if isinstance(program, str) else program.as_text()
    module = Module(text or "")
    found = list(module.walk(module.entry))
    if unreached := module.collective_names - {placed.instruction.name for placed in found}:
        raise HloError(f"collectives {sorted(unreached)} stand in no computation that the entry is seen to call")
    phases = Phases(module)
    return [c for placed in found for c in _read(placed, mesh, phases)]


def traffic(found: Iterable[Collective], by: tuple[str, ...] = ("kind", "axes", "dtype")) -> dict[tuple, int]:
    """`total_bytes` (messages, not wire) summed over collectives that agree in the fields `by`, as {values: bytes}.

    Raises:
        ValueError: `by` names something that is not a field of `Collective`.
    """
    known = [f.name for f in fields(Collective)]
    if unknown := [name for name in by if name not in known]:
        raise ValueError(f"traffic by {unknown}: a collective has the fields {known}")
    sums: dict[tuple, int] = {}
    for c in found:
        key = tuple(getattr(c, name) for name in by)
        sums[key] = sums.get(key, 0) + c.total_bytes
    return sums


def memory(compiled: jax.stages.Compiled) -> Memory:
    """What the compiler allocates on one device for one run of `compiled`.

    Raises:
        HloError: the backend gives no account of its memory.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise HloError("this backend does not report the memory of a compiled program")
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    on_host = any(getattr(stats, f"host_{what}_size_in_bytes") for what in ("argument", "output", "temp"))
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        # XLA:CPU's own peak leaves the temporaries out; XLA:GPU's adds constants and alignment.
        # Where arrays are in host memory, theirs has those in it.
        peak_bytes=max(0 if on_host else stats.peak_memory_in_bytes, held + stats.temp_size_in_bytes),
    )


def _check_mesh(compiled: jax.stages.Compiled, mesh: Mesh) -> None:
    """Refuses a mesh whose device order is not the program's: group members would be read as other devices."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    for other in {s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)}:
        if list(other.devices.flat) != list(mesh.devices.flat):
            raise HloError(f"the program was compiled for the devices of {other}, in that order, not of {mesh}")


# ---- instruction -> Collective --------------------------------------------------------------------------------------


def _read(placed: Placed, mesh: Mesh, phases: Phases) -> list[Collective]:
    """One Collective per dtype of the instruction's operands; none for groups of one device."""
    i, kind = placed.instruction, placed.instruction.kind or ""
    members = source_target_pairs if kind == "collective-permute" else replica_groups
    try:
        groups = members(i.attributes, mesh.size)
    except ValueError as error:
        raise HloError(f"instruction {i.name}: {error}") from error
    coordinates = np.unravel_index(groups, tuple(mesh.shape.values()))
    axes = tuple(name for name, at in zip(mesh.axis_names, coordinates, strict=True) if (at != at[:, :1]).any())
    if not axes:
        return []
    group_size = groups.shape[1] if kind != "collective-permute" else math.prod(mesh.shape[a] for a in axes)
    scale = group_size if kind == "reduce-scatter" else 1
    over_layers = phases.layer_loop(placed.whiles)
    return [
        Collective(
            name=i.name,
            kind=kind,
            axes=axes,
            group_size=group_size,
            dtype=dtype,
            message_bytes=size * scale,
            trips=placed.trips,
            loops=placed.loops,
            op_name=i.op_name,
            matmuls=placed.matmuls,
            phase=phases.of(i, placed.whiles),
            layer_turns=over_layers.trip_count if over_layers else 0,
        )
        for dtype, size in _bytes_by_dtype(i.name, _output_shape(i)).items()
    ]


def _output_shape(i: Instruction) -> str:
    """The result's shape. What starts a pair has the shape (inputs, outputs, context...), but for an all-reduce."""
    if not i.opcode.endswith("-start"):
        return i.shape
    if i.opcode == "all-reduce-start" and not i.shape.startswith("(("):
        return i.shape
    parts = tuple_parts(i.shape)
    if len(parts) < 2:
        raise HloError(f"instruction {i.name}: {i.opcode} of shape {i.shape!r} does not show inputs and outputs")
    return parts[1]


def _bytes_by_dtype(name: str, shape: str) -> dict[str, int]:
    """Bytes of all arrays in a shape, as {HLO dtype: bytes}."""
    sizes: dict[str, int] = {}
    try:
        for array in arrays(shape):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.bytes
    except HloError as error:
        raise HloError(f"instruction {name}: {error}") from error
    if not sizes:
        raise HloError(f"instruction {name}: no array in the shape {shape!r}")
    return sizes
