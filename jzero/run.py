"""A run: what `setup` returns, to start from, to step and to ask."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding

from jzero.driver import Driver
from jzero.gradients import Gradients, rows_per_device
from jzero.mesh import batch_sharding, data_size, process_rows
from jzero.offload.at_rest import on_device
from jzero.offload.files import Stored
from jzero.offload.state_params import params_of
from jzero.offload.stream import Stream
from jzero.optim import average_of
from jzero.pace import Pace
from jzero.specs import Specs
from jzero.step import Metrics, TrainState
from jzero.zero import Path, Whole, shard_bytes


@dataclass(frozen=True, repr=False)
class Run:
    """A model, a loss, an optimizer and a mesh, ready to train.

    Attributes:
        mesh: (node, dp, tp).
        specs: of everything at rest.
        whole: the parameters that the stage would shard and could not, each with the reason.
        notes: what a user should know of how this model runs.
        micro_batches: forward-backward passes per step.
        per_layer: the trained parameters as layers read them, a nested dict of ShapeDtypeStruct: where layers are
            stacked, one layer's.
        abstract_batch: one batch as ShapeDtypeStructs with their shardings.
    """

    mesh: Mesh
    specs: Specs
    whole: tuple[Whole, ...]
    notes: tuple[str, ...]
    micro_batches: int
    per_layer: Any
    abstract_batch: Any
    _gradients: Gradients
    _driver: Driver
    _evaluate: Any
    _average_at_rest: Any
    _pace: Pace

    def __repr__(self) -> str:
        """Mesh, parameters and bytes: a notebook shows what stands on a cell's last line."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return (
            f"Run(mesh={mesh}, {self.parameters:,} parameters, {sum(self.at_rest_bytes().values()):,} bytes a device)"
        )

    @property
    def abstract_state(self) -> TrainState:
        """The train state as ShapeDtypeStructs with their shardings; what is to rest in pieces outside of the device
        knows where (`offload.pieces.AbstractPieces`)."""
        return self._driver.state

    @property
    def file_bytes(self) -> int:
        """Of the files that this process keeps optimizer state and parameters in, as much as they reserve on all disks:
        small arrays take 4,096 bytes each."""
        return self._driver.file_bytes

    @property
    def parameters(self) -> int:
        """How many numbers the parameters are, frozen ones included."""
        state = self.abstract_state
        return sum(math.prod(x.shape) for x in jax.tree.leaves((state.params, state.frozen)))

    def init(self) -> TrainState:
        """A new train state, every array born in its shards.

        Raises:
            TierError: what rests in files cannot be written, or the run is closed.
        """
        return self._driver.init()

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One optimizer step; `state` is donated.

        Args:
            batch: tree of arrays [batch, ...] on the host or, better, from `put`.

        Returns:
            The new state, and scalars on the device: float32 `loss` (exact mean), `grad_norm` (before clipping),
            `weight` and the sums that the loss function returned; `lr` of the last update that was not skipped, where
            the optimizer's state has it (`jzero.make_optimizer`, `optax.inject_hyperparams`); int32 `skipped` and
            `skipped_in_row`.

        Raises:
            ValueError: a batch dim that the data-parallel devices times the microbatches do not divide, or a state that
                an earlier step has used up.
            TierError: what rests in files cannot be read or written, or the run is closed.
        """
        check_alive(state)
        rows_per_device(_whole(batch, self.mesh), self.mesh, self.micro_batches)
        state, metrics = self._driver.step(state, self._placed(batch))
        self._pace.dispatched(metrics)
        return state, metrics

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """The exact loss of a batch in evaluation mode.

        Args:
            batch: as for `step`, with any number of rows that the data-parallel devices divide.

        Returns:
            float32 scalars on the device: `loss` (exact mean), `weight`, and the sums that the loss function returned.

        Raises:
            ValueError: a batch dim that the devices do not divide, or a state that an earlier step has used up.
            TierError: what rests in files cannot be read, or the run is closed.
        """
        check_alive(state)
        rows = rows_per_device(_whole(batch, self.mesh), self.mesh, 1)
        given = self._driver.entered(dataclasses.replace(state, opt_state=()))
        with jax.set_mesh(self.mesh):
            metrics = self._evaluate(given, self._placed(batch), self._evaluation_parts(rows))
        self._driver.finished(metrics)
        self._pace.dispatched(metrics)
        return metrics

    def averaged(self, state: TrainState) -> TrainState:
        """A state whose parameters are the averages that `jzero.averaged` keeps, at rest: to evaluate or to export.

        It shares all else, and where nothing moves the averages too, with `state`: use it before the next step.

        Raises:
            ValueError: the optimizer keeps no average, or the state is used up.
            TierError: what rests in files cannot be read, or the run is closed.
        """
        check_alive(state)
        average = average_of(state.opt_state)
        with jax.set_mesh(self.mesh):
            return dataclasses.replace(state, params=self._average_at_rest(average))

    def model(self, state: TrainState) -> nnx.Module:
        """The NNX module on the state's global arrays.

        Raises:
            ValueError: an earlier step has used the state up.
            TierError: what rests in files cannot be read, or the run is closed.
        """
        check_alive(state)
        params = {path: on_device(x) for path, x in params_of(state).items()}
        return self._gradients.template.merge(params, flatten_dict(state.model_state), {})

    def close(self) -> None:
        """Removes the files of what rests in them, which else go with the run and its states, or with the process.

        Its states go with them: whatever it is asked for then is refused.

        Raises:
            TierError: they cannot be removed.
        """
        self._driver.close()

    def put(self, batch: Any) -> Any:
        """`batch` on the mesh, its first dim split over the data-parallel devices; does not wait.

        Args:
            batch: arrays of the host; with several processes each gives the rows that `jzero.process_rows` names.

        Raises:
            ValueError: a batch dim that the data-parallel devices do not divide.
        """
        rows_per_device(_whole(batch, self.mesh), self.mesh, 1)
        return self._placed(batch)

    def _placed(self, batch: Any) -> Any:
        sharding = batch_sharding(self.mesh)

        def place(x: Any) -> jax.Array:
            if isinstance(x, jax.Array):  # of all processes already
                return jax.device_put(x, sharding)
            return jax.make_array_from_process_local_data(sharding, x)

        return jax.tree.map(place, batch)

    def trace(self) -> dict[str, jax.stages.Traced]:
        """The run's programs as jaxprs, by name; no array is made."""
        with jax.set_mesh(self.mesh):
            return {name: program.trace(*arguments) for name, (program, arguments) in self._driver.programs.items()}

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """The run's programs, lowered, by name; no array is made."""
        with jax.set_mesh(self.mesh):
            return {name: traced.lower() for name, traced in self.trace().items()}

    def at_rest_bytes(self) -> dict[str, int]:
        """Bytes that one device holds between steps, by class."""
        return {name: tiers.get("device", 0) for name, tiers in self.tier_bytes().items()}

    def tier_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of one device's part of the train state between steps, by class and by where they rest.

        Tiers are "device", "host" and "nvme".
        """
        state, specs = self.abstract_state, self.specs.state
        names = ("params", "frozen", "opt_state", "model_state")
        tiers = dict.fromkeys(self.params_on_host(), "host") | dict.fromkeys(self.params_in_files(), "nvme")
        of_params = {"params": tiers, "frozen": tiers}
        found = {
            name: self._by_tier(getattr(state, name), getattr(specs, name), of_params.get(name, {})) for name in names
        }
        elsewhere = dict(self._driver.elsewhere_bytes)
        found["opt_state"] = {"device": found["opt_state"]["device"] - sum(elsewhere.values()), **elsewhere}
        return found

    def params_on_host(self) -> frozenset[Path]:
        """Parameters, trained and frozen, that rest in host memory; of absent devices no sharding says so."""
        return frozenset(path for path, to in self._gradients.layouts.items() if to.memory)

    def params_in_files(self) -> frozenset[Path]:
        """Parameters, trained and frozen, that rest in files."""
        return frozenset(path for path, to in self._gradients.layouts.items() if to.in_files)

    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory from step to step, of one device's part: what its copies read and write there."""
        rest = self.tier_bytes()
        params = sum(rest[name].get("host", 0) for name in ("params", "frozen"))
        groups = self.stream.groups if self.stream else ()
        state = sum(group.state.nbytes for group in groups if group.state.tier.name == "host" and not group.on_cpu)
        return params + self.host_grads_bytes() + state

    @property
    def stream(self) -> Stream | None:
        """The groups in which the optimizer runs; None where a step is one program."""
        return self._driver.step if isinstance(self._driver.step, Stream) else None

    def _by_tier(self, shapes: Any, specs: Any, tiers: Mapping[Path, str]) -> dict[str, int]:
        found = {"device": 0}
        for (keys, x), spec in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(specs), strict=True):
            tier = tiers.get(tuple(key.key for key in keys), "device") if tiers else "device"
            found[tier] = found.get(tier, 0) + shard_bytes(x, NamedSharding(self.mesh, spec))
        return found

    @property
    def grads_dtype(self) -> Any:
        """The dtype in which gradients are accumulated."""
        return next(x.dtype for x in self._gradients.slots.values())

    def grads_bytes(self) -> int:
        """Bytes of the gradients that one device accumulates in its memory during a step."""
        return sum(self._slot_bytes(path) for path in self._gradients.slots.keys() - self.grads_on_host())

    def stacked(self) -> frozenset[Path]:
        """Parameters, trained and frozen, whose leading dims number layers."""
        return frozenset(path for path, dims in self._gradients.layers.items() if dims)

    def host_grads_bytes(self) -> int:
        """Bytes that gradients of one device take of host memory, from step to step: with microbatches twice their own,
        for those of a microbatch and for their sum.
        """
        return self._gradients.memories * sum(map(self._slot_bytes, self.grads_on_host()))

    def grads_on_host(self) -> frozenset[Path]:
        """Trained parameters whose gradients are accumulated in host memory."""
        return frozenset(path for path, to in self._gradients.trained_layouts.items() if to.grads_memory)

    def _slot_bytes(self, path: Path) -> int:
        sharding = NamedSharding(self.mesh, self._gradients.tp_specs[path])
        return shard_bytes(self._gradients.slots[path], sharding)

    def _evaluation_parts(self, rows: int) -> int:
        """Microbatches of an evaluation over `rows` rows a device: no more rows at a time than in training."""
        at_a_time = rows_per_device(self.abstract_batch, self.mesh, self.micro_batches)
        return next(n for n in range(-(-rows // at_a_time), rows + 1) if rows % n == 0)


def _whole(batch: Any, mesh: Mesh) -> Any:
    """Shapes of the batch that all processes hold together: arrays of the host are the part of this one."""
    if jax.process_count() == 1:
        return batch
    processes = data_size(mesh) // len(process_rows(mesh, data_size(mesh)))

    def whole(x: Any) -> Any:
        if isinstance(x, jax.Array) or not getattr(x, "shape", ()):
            return x
        return jax.ShapeDtypeStruct((x.shape[0] * processes, *x.shape[1:]), x.dtype)

    return jax.tree.map(whole, batch)


def check_alive(state: TrainState) -> None:
    """Refuses a train state of which part was donated.

    Raises:
        ValueError: an earlier step has used it up, or in files another state took its place.
        TierError: part of it was in files, and the run is closed.
    """
    leaves = jax.tree.leaves(state)
    for x in leaves:
        if isinstance(x, Stored):
            x.check()
    # Not left to JAX: version 0.10 crashes on the second use of a donated array.
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
        raise ValueError(
            "part of this train state was given to an earlier step, which reused its memory: use what step returned"
        )
