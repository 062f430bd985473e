"""What runs a step: one program, or several in turn (`jzero/offload`)."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.gradients import Gradients
from jzero.optim import Optimizer
from jzero.step import Metrics, TrainState, train_step


@dataclass(frozen=True)
class Driver:
    """How a train state is made and goes on.

    Attributes:
        init: () -> a new train state.
        step: (state, batch) -> (state, metrics); uses the state up.
        programs: by name, each jitted program of a step with abstract arguments.
        elsewhere_bytes: of optimizer state at rest outside of the device, of one device, by tier.
        file_bytes: that the files of this process reserve.
        state: abstract, with where each piece rests of what rests in pieces.
        entered: a state, abstract or not, as programs are given it.
        close: removes the files of what rests in them.
        finished: to be called with what a program returned that is given such a state.
    """

    init: Callable[[], TrainState]
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    state: TrainState
    programs: Mapping[str, tuple[Any, tuple[Any, ...]]]
    elsewhere_bytes: Mapping[str, int] = field(default_factory=dict)
    file_bytes: int = 0
    entered: Callable[[TrainState], TrainState] = lambda state: state
    finished: Callable[[Any], object] = lambda _: None
    close: Callable[[], None] = lambda: None


def at_once(
    optimizer: Optimizer,
    gradients: Gradients,
    clip_norm: float,
    state: TrainState,
    batch: Any,
    born: Callable[[Optimizer], TrainState],
    options: dict[str, Any] | None,
) -> Driver:
    """All of a step in one program, with everything on the device.

    Args:
        clip_norm: largest global norm of the gradient; infinite for none.
        state, batch: abstract, with shardings.
        born: makes a new train state with the state of an optimizer; not jitted.
        options: of the compiler.
    """
    shardings = jax.tree.map(lambda x: x.sharding, state)
    mesh = state.step.sharding.mesh
    step = jax.jit(
        functools.partial(train_step, gradients, optimizer, mesh, clip_norm),
        in_shardings=(shardings, jax.tree.map(lambda x: x.sharding, batch)),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
        compiler_options=options,
    )
    init = jax.jit(functools.partial(born, optimizer), out_shardings=shardings)
    return Driver(in_mesh(mesh, init), in_mesh(mesh, step), state, {"step": (step, (state, batch))})


def in_mesh(mesh: Mesh, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with `mesh` as the one that sharding annotations in it are of."""

    @functools.wraps(call)
    def called(*args: Any) -> Any:
        with jax.set_mesh(mesh):
            return call(*args)

    return called
