"""What a loss does with a model, found by tracing it once on abstract values.

The model is unmodified code, so where it reads each parameter, what of its state it changes and what it returns have to
be found out; `reads.py` follows parameters through the program.  What ZeRO cannot run as it stands is refused here, in
words, by leaf and line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.collectives import over_data
from jzero.mesh import DATA_AXES
from jzero.reads import Marks, UnsupportedModelError, Uses, place_of, placed_over
from jzero.template import Template
from jzero.use import ASSIGNED
from jzero.zero import Layout, Path, path_name

RESERVED = frozenset({"loss", "weight", "grad_norm", "lr", "skipped", "skipped_in_row"})
LossFn = Callable[[Any, Any], tuple[Any, ...]]

Values = Mapping[Path, Any]

_MANUAL = (
    "a sharding constraint inside the model, at {place}, does not hold in the region that is manual over the "
    f"data-parallel axes {DATA_AXES}: the batch is already split there; constrain over 'tp' alone"
)


@dataclass(frozen=True)
class Probe:
    """What a loss does, as found by tracing it.

    Attributes:
        uses: of each parameter.
        changed: what of the model's state it changes.
        sum_names: of the sums it returns.
    """

    uses: Mapping[Path, Uses]
    changed: frozenset[Path]
    sum_names: tuple[str, ...]


def probe(
    template: Template, loss_fn: LossFn, mesh: Mesh, params: Values, state: Values, batch: Any, *, train: bool = True
) -> Probe:
    """Traces the loss once on abstract values.

    Args:
        params, state, batch: anything with shapes and dtypes; `batch` is one device's rows of one microbatch.
        train: False traces it in evaluation mode.

    Raises:
        UnsupportedModelError: a sharding constraint over data-parallel axes inside the model, state that changes
            shape, or parameters that are assigned to.
    """
    marks, changed = Marks(), set()

    def traced(params: Values, state: Values, batch: Any) -> tuple[Values, dict[str, jax.Array]]:
        values = {path: marks.mark(x) if path in template.early else x for path, x in params.items()}
        model = template.merge(values, state, dict.fromkeys(params.keys() - template.early, marks.mark))
        if not train:
            model.eval()
        sums = sums_of(loss_fn, model, batch)
        after = template.state_of(model)
        changed.update(path for path, old in state.items() if _changes(path, old, after[path]))
        return {**params, **template.params_of(model)}, sums

    region = over_data(traced, mesh, P(), P())
    try:
        jaxpr, (_, sums) = jax.make_jaxpr(region, return_shape=True)(params, state, batch)
    except ValueError as error:
        raise _explained(error) from error
    place = placed_over(jaxpr.jaxpr, DATA_AXES)
    if place:
        raise UnsupportedModelError(_MANUAL.format(place=place))
    paths = jax.tree.unflatten(jax.tree.structure(params), range(len(params)))
    uses, results = marks.find(jaxpr.jaxpr, jaxpr.jaxpr.invars[: len(params)])
    for path, i in paths.items():
        # A loop over another dim than the first transposes the whole stack, and back again.
        transposed = {raw.primitive for raw in uses[i].raw} == {"transpose"}
        if results[i] != i and not transposed:
            raise UnsupportedModelError(f"parameter {path_name(path)!r} is assigned to inside the loss; {ASSIGNED}")
    return Probe({path: uses[i] for path, i in paths.items()}, frozenset(changed), tuple(sums))


def sums_of(loss_fn: LossFn, model: Any, batch: Any) -> dict[str, jax.Array]:
    """What a loss function returns, as float32 scalars by name.

    Raises:
        TypeError: it is not (sum of losses, weight) or (sum of losses, weight, dict of sums), all real scalars.
    """
    result = loss_fn(model, batch)
    wanted = (
        f"{_named(loss_fn)} must return (sum of losses, weight) or (sum of losses, weight, dict of sums), "
        f"all of them real scalars"
    )
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise TypeError(f"{wanted}; it returned {_describe(result)} (a mean over a batch is exact on one device only)")
    extra = result[2] if len(result) == 3 else {}
    if not isinstance(extra, Mapping):
        raise TypeError(f"{wanted}; its third value is {_describe(extra)}")
    if taken := RESERVED & set(extra):
        raise TypeError(f"{wanted}; its third value names {sorted(taken)}, which metrics have anyway: rename")
    sums = {"loss": result[0], "weight": result[1], **extra}
    for name, value in sums.items():
        if not (isinstance(value, int | float) or hasattr(value, "dtype")) or jnp.iscomplexobj(value):
            raise TypeError(f"{wanted}; {name!r} is {_describe(value)}")
        if jnp.shape(value) != ():
            raise TypeError(f"{wanted}; {name!r} has the shape {jnp.shape(value)}: sum it")
    return {name: jnp.asarray(value, jnp.float32) for name, value in sums.items()}


def layer_dims(shape: tuple[int, ...], uses: Uses) -> int:
    """How many leading dims of a parameter number layers: those that are gone where it is read."""
    return max((len(shape) - len(read.shape) for read in uses.reads), default=0)


def hoisted(
    uses: Mapping[Path, Uses], params: Values, layers: Mapping[Path, int], layouts: Mapping[Path, Layout]
) -> frozenset[Path]:
    """The parameters that come into use once, before the loss.

    Args:
        params: anything with shapes.
        layers: how many leading dims of each number layers.
    """
    return frozenset(
        path for path, x in params.items() if hoists(path, x.shape, uses[path], layers[path], moves=layouts[path].moves)
    )


def hoists(path: Path, shape: tuple[int, ...], uses: Uses, layers: int, *, moves: bool) -> bool:
    """Whether a parameter comes into use once, before the loss, rather than where it is read.

    It does when it is read twice, in a loop that does not slice it, or in a branch (where devices would wait for those
    that took another), and when something takes it without reading it.  A stacked parameter cannot, if that takes
    traffic: the whole stack would be gathered, or fetched from the host.

    Args:
        layers: how many leading dims of `shape` number layers.
        moves: bringing the parameter into use, or its gradient to rest, takes traffic.

    Raises:
        UnsupportedModelError: names the parameter, the place in the user's code and the remedy.
    """
    if layers == 0:
        elsewhere = any(read.loops or read.branch or read.shape != shape for read in uses.reads)
        return len(uses.reads) > 1 or bool(uses.raw) or elsewhere
    problem = _stacked_problem(shape, uses, layers)
    if problem and moves:
        raise UnsupportedModelError(
            f"parameter {path_name(path)!r} of shape {shape}, stacked over layers, {problem}; it would have to be "
            f"gathered or fetched for all layers at once: change that place, or keep it whole with zero.replicate, and "
            f"on the device"
        )
    return problem is not None


def _stacked_problem(shape: tuple[int, ...], uses: Uses, layers: int) -> str | None:
    for raw in uses.raw:
        return (
            f"goes into {raw.primitive!r} at {raw.place} without being read through its Variable inside the layer loop"
        )
    for read in uses.reads:
        if shape[layers:] != read.shape:
            return f"is read with the shape {read.shape} at {read.place}, not as one layer {shape[layers:]} along dim 0"
        if read.branch:
            return (
                f"is read inside a cond or while at {read.place}, where devices would wait for those in other branches"
            )
    return None


def _explained(error: ValueError) -> ValueError:
    frames = []
    tb = error.__traceback__
    while tb is not None:
        frames.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    # JAX may have left its own frames out of the traceback; its message then says it.
    if not {"with_sharding_constraint", "reshard"} & set(frames) and "with_sharding_constraint" not in str(error):
        return error
    return UnsupportedModelError(f"{_MANUAL.format(place=place_of(error))} ({error})")


def _changes(path: Path, old: jax.Array, new: Any) -> bool:
    if jnp.shape(new) != old.shape:
        raise UnsupportedModelError(
            f"{path_name(path)!r}, which the model holds beside its parameters, has the shape {old.shape} before the "
            f"loss and {jnp.shape(new)} after it: what is carried from step to step must keep its shape"
        )
    return new is not old


def _describe(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    if isinstance(result, jax.Array):
        return f"an array of shape {result.shape} and dtype {result.dtype}"
    return f"a {type(result).__name__}"


def _named(loss_fn: LossFn) -> str:
    code = getattr(loss_fn, "__code__", None)
    return f"loss_fn, at {code.co_filename}:{code.co_firstlineno} ({code.co_name})," if code else "loss_fn"


def notes(
    found: Probe,
    layers: Mapping[Path, int],
    layouts: Mapping[Path, Layout],
    hoisted: frozenset[Path],
    *,
    regather: bool,
) -> tuple[str, ...]:
    """What a user should know of how a model runs.

    Args:
        layers: how many leading dims of each parameter number layers.
        regather: gathered parameters are meant to be gathered again in the backward pass.
    """
    moved = [path for path, to in layouts.items() if to.moves]
    across = [(path, raw.place) for path in moved for raw in found.uses[path].raw if raw.primitive == "transpose"]
    reads = [(path, read) for path in moved if path not in hoisted for read in found.uses[path].reads]
    kept = [
        (path, read.place)
        for path, read in reads
        if regather and layouts[path].use_forward.moves and read.loops and not read.remat
    ]
    often = [(path, read.place) for path, read in reads if read.loops > layers[path]]
    return (
        *_note(
            kept,
            "are gathered in a layer loop without rematerialisation: all layers stay gathered until the backward pass; "
            "run it as jzero.scan_layers(…), or wrap its body in nnx.remat(…, policy=jzero.remat_policy('none')), "
            "to gather them again",
        ),
        *_note(
            often,
            "are read in a loop inside their layer: their gradients are reduced in each of its iterations; "
            "read them before it (w = layer.w[...])",
        ),
        *_note(
            across,
            "are looped over along another dim than the first: they come into use for all layers at once; "
            "stack layers along dim 0",
        ),
    )


def _note(places: Sequence[tuple[Path, str]], text: str) -> tuple[str, ...]:
    if not places:
        return ()
    path, place = places[0]
    return (f"{len({p for p, _ in places})} stacked parameters ({path_name(path)} at {place} …) {text}",)
