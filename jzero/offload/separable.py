"""Whether an optimizer can be run in parts: read off the jaxpr of its update, before anything is compiled.

An optimizer that is run leaf by leaf, or on slices of leaves, gives the same numbers only if what it computes for one
part needs nothing of the others.  Most optax transformations are like that: Adam takes each element by itself, Muon and
Adafactor each matrix; one that clips by the global norm inside of it does not.  So the update is traced once, and every
value in it is followed back to the parameters whose gradient, value or state it comes from.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jzero.zero import Path, path_name


class SeparationError(ValueError):
    """An optimizer that cannot be run in parts; the message names what it computes from several parameters."""


@dataclass(frozen=True)
class Origin:
    """Where a value in an update comes from.

    Attributes:
        paths: the parameters whose gradient, value or state it is computed from.
        placewise: each of its elements comes from the same element of those alone.  A value from no parameter at all,
            such as a learning rate, is so if all its elements are the same number.
        place: the operation that first brought several parameters together, or "".
    """

    paths: frozenset[Path] = frozenset()
    placewise: bool = True
    place: str = ""

    def beside(self, other: "Origin", place: str) -> "Origin":
        """Of what is computed from both at `place`."""
        paths = self.paths | other.paths
        met = place if len(paths) > 1 and not (self.place or other.place) else ""
        return Origin(paths, self.placewise and other.placewise, self.place or other.place or met)


SAME = Origin()

# Primitives whose result at a place needs their operands at that place alone.
PLACEWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p
    cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma
    log log1p logistic lt max min mul name ne neg nextafter not or pow real reduce_precision rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sharding_constraint sign sin sinh sqrt
    square stop_gradient sub tan tanh xor""".split()  # noqa: SIM905 (a table)
)
# Primitives that spread or reshape a value that is the same everywhere without making it differ.
SPREADING = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "rev"})


def placewise(traced: Jaxpr, opt_state: Any, params: Any, owners: Sequence[Path | None]) -> frozenset[Path]:
    """The parameters that an update takes element by element; it takes each of the others by itself, as a whole.

    Args:
        traced: (grads, optimizer state, parameters, loss) -> (parameters, optimizer state), as of `optim.Optimizer`.
        opt_state, params: that it was traced for; params a nested dict.
        owners: of each leaf of the optimizer state the parameter that it is of, None where it is of none.

    Raises:
        SeparationError: what becomes of a parameter, or of the state that is of none, is computed from several ones;
            names it and the operation.
    """
    paths = [tuple(k.key for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    of_params = [Origin(frozenset({path})) for path in paths]
    states = jax.tree.leaves(opt_state)
    of_state = [
        Origin(frozenset({owner})) if owner is not None else Origin(placewise=x.size <= 1)
        for owner, x in zip(owners, states, strict=True)
    ]
    found = _origins(traced, [*of_params, *of_state, *of_params, SAME])
    results = list(zip([*paths, *owners], found, strict=True))
    names = [f"parameter {path_name(path)!r}" for path in paths]
    names += [
        f"optimizer state {jax.tree_util.keystr(path, simple=True, separator='/')!r}"
        for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)
    ]
    for name, (owner, origin) in zip(names, results, strict=True):
        _check(name, owner, origin)
    shapes = {path: x.shape for path, x in zip(paths, jax.tree.leaves(params), strict=True)}
    whole = {owner for owner, origin in results if owner is not None and not origin.placewise}
    whole |= {o for o, x in zip(owners, states, strict=True) if o is not None and x.shape != shapes[o]}
    return frozenset(paths) - whole


def _check(name: str, owner: Path | None, origin: Origin) -> None:
    others = origin.paths - {owner}
    if not others:
        return
    some = ", ".join(sorted(map(path_name, origin.paths))[:3])
    at = f" (by {origin.place!r})" if origin.place else ""
    raise SeparationError(
        f"tx cannot be run in groups: {name} is computed from {len(origin.paths)} parameters, such as {some}{at}; a "
        f"clip by global norm belongs into clip_norm, not into tx; other optimizers of this kind cannot be offloaded"
    )


def _origins(jaxpr: Jaxpr, inputs: Sequence[Origin]) -> list[Origin]:
    """Of the results of `jaxpr`, given those of its arguments."""
    known: dict[Var, Origin] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {var: Origin(placewise=_size(var) <= 1) for var in jaxpr.constvars}

    def of(atom: Any) -> Origin:
        return Origin(placewise=_size(atom) <= 1) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        results = _of_equation(eqn, [of(atom) for atom in eqn.invars])
        known |= dict(zip(eqn.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _of_equation(eqn: JaxprEqn, inputs: list[Origin]) -> list[Origin]:
    name = eqn.primitive.name
    if name == "cond":
        return _of_branches(eqn, inputs)
    inside = called(eqn)
    if inside is not None and len(inside[0].invars) == len(inputs):
        return _origins(inside[0], inputs)
    if name == "optimization_barrier":  # hands each operand on
        return inputs
    together = _together(inputs, name)
    keeps = name in PLACEWISE or (name in SPREADING and not together.paths)
    return [_result(together, keeps=keeps, size=_size(var)) for var in eqn.outvars]


def _result(together: Origin, *, keeps: bool, size: int) -> Origin:
    same = keeps or (size <= 1 and not together.paths)
    return Origin(together.paths, (together.placewise and same) or (size <= 1 and not together.paths), together.place)


def _of_branches(eqn: JaxprEqn, inputs: list[Origin]) -> list[Origin]:
    predicate, *operands = inputs
    results = [_origins(branch.jaxpr, operands) for branch in eqn.params["branches"]]
    decided = Origin(predicate.paths, predicate.placewise and not predicate.paths, predicate.place)
    return [_together([decided, *branches], "cond") for branches in zip(*results, strict=True)]


def _together(origins: Iterable[Origin], place: str) -> Origin:
    result = SAME
    for origin in origins:
        result = result.beside(origin, place)
    return result


def called(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """What an equation calls once, and its constants; None for operations, and for loops, whose turns depend on each
    other."""
    if eqn.primitive.name in ("while", "scan"):
        return None
    params: Mapping[str, Any] = eqn.params
    inside = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
    consts, inside = getattr(inside, "consts", ()), getattr(inside, "jaxpr", inside)
    return (inside, consts) if isinstance(inside, Jaxpr) else None


def _size(var: Any) -> int:
    return math.prod(var.aval.shape)
