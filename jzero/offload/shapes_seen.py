"""Whether an optimizer looks at shapes: its update, traced for pieces of parameters, against that of whole ones.

An optimizer can take each element by itself and still ask how many there are when it is traced (u / u.size), and a
piece of a parameter would get another update without a word.  So each value of a trace gets a number, equal for two
values that are made by the same operations from the same arguments and constants, whatever their shapes (value
numbering, as compilers have it).  Where the numbers of a parameter's results are others for its pieces, the optimizer
has looked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jzero.offload.separable import PLACEWISE, SPREADING, called
from jzero.zero import Path

Shape = tuple[int, ...]
_SHARDINGS = {"sharding", "out_sharding"}  # parameters of operations that change no number
_LARGE = 2**16  # elements of a constant that are compared


def looked_at(
    traced: ClosedJaxpr,
    trace: Callable[[Mapping[Path, Shape]], ClosedJaxpr],
    owners: Sequence[Path | None],
    shapes: Mapping[Path, Sequence[Shape]],
) -> frozenset[Path]:
    """Those of the parameters in `shapes` that get another update in these shapes than whole.

    Args:
        traced: an update that takes each of them element by element (`separable.placewise`).
        trace: the same with some parameters, and what belongs to them, in other shapes.
        owners: of each result, the parameter that it is of, None where it is of none.
        shapes: in which each is to be updated.
    """
    numbers, found = _Numbers(), set[Path | None]()
    whole = numbers.of(traced)
    for turn in range(max(map(len, shapes.values()), default=0)):
        try:
            pieces = trace({path: own[min(turn, len(own) - 1)] for path, own in shapes.items()})
        except (TypeError, ValueError, AssertionError):  # it knows the shapes, and says so
            return frozenset(shapes)
        results = zip(owners, whole, numbers.of(pieces), strict=True)
        found |= {owner for owner, one, other in results if one != other}
    # State that is of no parameter would hang on the shapes of all.
    return frozenset(shapes) if None in found else frozenset(shapes) & found


class _Numbers:
    """Gives values numbers: the same for the same computation."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, traced: ClosedJaxpr) -> list[int]:
        """Of the results of a trace."""
        inputs = [self._number("argument", i) for i, _ in enumerate(traced.jaxpr.invars)]
        return self._results(traced.jaxpr, traced.consts, inputs)

    def _number(self, *key: Any) -> int:
        return self._known.setdefault(key, len(self._known))

    def _results(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {var: self._constant(x) for var, x in zip(jaxpr.constvars, consts, strict=True)}

        def of(atom: Any) -> int:
            return self._constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            known |= dict(zip(eqn.outvars, self._of_equation(eqn, [of(x) for x in eqn.invars]), strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    def _constant(self, x: Any) -> int:
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jax.dtypes.extended) or np.size(x) > _LARGE:
            return self._number(object())  # like no other
        return self._number("constant", dtype.name, np.shape(x), np.asarray(x, dtype).tobytes())

    def _of_equation(self, eqn: JaxprEqn, inputs: list[int]) -> list[int]:
        name = eqn.primitive.name
        if name == "cond":
            predicate, *operands = inputs
            results = [self._results(branch.jaxpr, branch.consts, operands) for branch in eqn.params["branches"]]
            return [self._number("cond", predicate, *each) for each in zip(*results, strict=True)]
        inside = called(eqn)
        if inside is not None and len(inside[0].invars) == len(inputs):
            return self._results(*inside, inputs)
        if name in SPREADING or name in ("optimization_barrier", "sharding_constraint"):
            return inputs  # of the same number everywhere, in another shape; or as it was
        settings = tuple((key, _text(x)) for key, x in sorted(eqn.params.items()) if key not in _SHARDINGS)
        # Elsewhere than in operations on each place, what comes out may hang on shapes: a sum of ones.
        avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        shapes = () if name in PLACEWISE else tuple(aval.shape for aval in avals)
        dtypes = [str(aval.dtype) for aval in avals[len(inputs) :]]
        return [self._number(name, settings, *inputs, shapes, i, dtype) for i, dtype in enumerate(dtypes)]


def _text(x: Any) -> str:
    """A parameter of an operation: what it does, not where it lies in memory."""
    return str(x) if isinstance(x, Jaxpr | ClosedJaxpr) else "" if callable(x) else repr(x)
