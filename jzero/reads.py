"""Where a loss reads each parameter: read off its jaxpr, before anything is compiled.

A model is unmodified code, so how it uses a parameter has to be found out: whether a leaf is stacked over layers,
whether it is read once or several times (a tied table), inside a loop without being sliced by it, inside a branch
(where devices would wait for each other for ever), or not through its Variable at all (a sum over `nnx.state`, which
would see a shard).  The loss is traced once with every parameter read through `mark`; `find` then follows each
parameter through the program.
"""

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import flax
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

_MARK = "jzero.read:"
_HERE = Path(__file__).resolve().parent
_LIBRARIES = (_HERE, *(Path(str(module.__file__)).resolve().parent for module in (jax, flax)))
_MODELS = _HERE / "models"


class UnsupportedModelError(ValueError):
    """A model does something that ZeRO cannot run as it stands; the message names the place and the remedy."""


@dataclass(frozen=True)
class Read:
    """One place in the program at which a parameter's value is taken.

    Attributes:
        shape: of the value, layer dims gone.
        loops: how many loops stand round it.
        branch: it stands inside a `cond`, `switch` or `while`.
        remat: it stands inside a `jax.checkpoint`.
        place: file and line of the user's code.
    """

    shape: tuple[int, ...]
    loops: int
    branch: bool
    remat: bool
    place: str


@dataclass(frozen=True)
class Raw:
    """One place at which a parameter at rest goes into an operation without having been read."""

    primitive: str
    place: str


@dataclass
class Uses:
    """All that a program does with one parameter."""

    reads: list[Read] = field(default_factory=list)
    raw: list[Raw] = field(default_factory=list)


class Marks:
    """Hands out marks for reads while a loss is traced, and remembers the place of each."""

    def __init__(self) -> None:
        self._marks: list[tuple[tuple[int, ...], str]] = []

    def mark(self, value: jax.Array) -> jax.Array:
        """`value`, with a mark in the program that says: here a parameter is read."""
        self._marks.append((value.shape, user_place()))
        return checkpoint_name(value, f"{_MARK}{len(self._marks) - 1}")

    def find(self, jaxpr: Jaxpr, leaves: Sequence[Var]) -> tuple[list[Uses], list[int | None]]:
        """What `jaxpr` does with each of its inputs `leaves`, and which of them each of its results is, unchanged."""
        uses, tracked = [Uses() for _ in leaves], {var: i for i, var in enumerate(leaves)}
        self._walk(jaxpr, tracked, uses, _Where())
        return uses, [None if isinstance(v, Literal) else tracked.get(v) for v in jaxpr.outvars]

    def _walk(self, jaxpr: Jaxpr, tracked: dict[Var, int], uses: list[Uses], where: "_Where") -> None:
        taken = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
        used = {v for v in taken if not isinstance(v, Literal)}
        for eqn in jaxpr.eqns:
            here = {i: tracked[v] for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in tracked}
            if not here:
                continue
            if eqn.primitive.name == "name" and eqn.params["name"].startswith(_MARK):
                if eqn.outvars[0] in used:
                    self._read(eqn, uses[here[0]], where)
                continue
            inner = list(_inner(eqn))
            for sub, operands, inside in inner:
                inputs = {v: here[i] for v, i in zip(sub.invars, operands, strict=True) if i in here}
                self._walk(sub, inputs, uses, where.enter(inside))
                # A loop hands its parameters back unchanged; they are the same leaf at rest, further down.
                for out, result in zip(eqn.outvars, sub.outvars, strict=False):
                    if not isinstance(result, Literal) and result in inputs:
                        tracked[out] = inputs[result]
            if not inner:
                place = source_info_util.summarize(eqn.source_info)
                for leaf in set(here.values()):
                    uses[leaf].raw.append(Raw(eqn.primitive.name, place))

    def _read(self, eqn: JaxprEqn, uses: Uses, where: "_Where") -> None:
        shape, place = self._marks[int(eqn.params["name"].removeprefix(_MARK))]
        uses.reads.append(Read(shape, where.loops, where.branch, where.remat, place))


def placed_over(jaxpr: Jaxpr, axes: Iterable[str]) -> str | None:
    """Where a program says how a tensor lies over one of the mesh `axes`, or None if it does not."""
    for eqn in jaxpr.eqns:
        values = [v for value in eqn.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
        if eqn.primitive.name in ("sharding_constraint", "device_put", "reshard"):
            for sharding in values:
                if isinstance(sharding, NamedSharding) and set(axes) & set(jax.tree.leaves(tuple(sharding.spec))):
                    return source_info_util.summarize(eqn.source_info)
        subs = (getattr(value, "jaxpr", value) for value in values)
        place = next(filter(None, (placed_over(sub, axes) for sub in subs if isinstance(sub, Jaxpr))), None)
        if place:
            return place
    return None


@dataclass(frozen=True)
class _Where:
    loops: int = 0
    branch: bool = False
    remat: bool = False

    def enter(self, inside: str) -> "_Where":
        return _Where(
            self.loops + (inside == "loop"), self.branch or inside == "branch", self.remat or inside == "remat"
        )


def _inner(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[int], str]]:
    """The programs inside an operation, which of its operands each takes, and what kind of place they are."""
    name, params = eqn.primitive.name, eqn.params
    operands = range(len(eqn.invars))
    if name == "cond":
        for branch in params["branches"]:
            yield branch.jaxpr, operands[1:], "branch"
    elif name == "while":
        test, body = params["cond_nconsts"], params["body_nconsts"]
        yield params["body_jaxpr"].jaxpr, operands[test:], "branch"
        yield params["cond_jaxpr"].jaxpr, [*operands[:test], *operands[test + body :]], "branch"
    else:
        kind = {"scan": "loop", "checkpoint": "remat", "remat2": "remat"}.get(name, "call")
        for value in params.values():
            sub = getattr(value, "jaxpr", value)
            if isinstance(sub, Jaxpr) and len(sub.invars) == len(operands):
                yield sub, operands, kind


def user_place() -> str:
    """``file.py:12 (function)`` of the innermost frame that is neither JAX's, Flax's nor jzero's."""
    return _place(traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False))


def place_of(error: BaseException) -> str:
    """The same for the place where an exception was raised."""
    return _place(reversed(traceback.extract_tb(error.__traceback__)))


def _place(frames: Iterable[traceback.FrameSummary]) -> str:
    """The first of `frames`, innermost first, that is the user's."""
    for frame in frames:
        if not _is_library(frame.filename):
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return "an unknown place"


def _is_library(filename: str) -> bool:
    path = Path(filename)
    inside = any(path.is_relative_to(library) for library in _LIBRARIES)
    return "<" in filename or (inside and not path.is_relative_to(_MODELS))
