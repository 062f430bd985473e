"""Trains the built-in decoder on bytes: `python -m jzero.train`.

Read `train` top-down: settings, devices, data, run, loop.  Everything it does is a call to the library, in the order in
which a program of your own would make the calls.

Exit status: 0, the run reached its last step; 1, it failed; 2, the input was wrong and nothing was written.
"""

import functools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
import optax.contrib
from flax import nnx

import jzero
from jzero import chains, compile_cache, data, watch
from jzero import mesh as meshes
from jzero.config import Config, ConfigError, Data, load, profile_steps, resolve, to_yaml
from jzero.journal import Journal, RunError, Waiting
from jzero.models.decoder import Decoder, next_token_loss
from jzero.models.flops import flops_per_token
from jzero.zero import ShardingError

FAKE_DEVICES = 8
IN_FLIGHT = 2  # steps dispatched beyond the one whose metrics are read


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as `argv` says and returns the exit status."""
    try:
        train(load(sys.argv[1:] if argv is None else argv))
    except (ConfigError, data.DataError, compile_cache.CacheError) as error:
        return _say(error, 2)
    except (RunError, OSError) as error:  # OSError: a full disk, data that is gone
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    return 0


def _say(error: object, status: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return status


def train(config: Config) -> None:
    """One run, from its settings to its last evaluation.

    Raises:
        ConfigError: a setting that cannot be honoured; nothing is written.
        DataError: data that cannot be trained on; nothing is written.
        CacheError: compiled programs cannot be kept where they should; nothing is written.
        RunError: too many steps in a row had a non-finite gradient, or the run ended without a finite loss.
    """
    # Settings and devices.
    start_cpu_devices()
    config = resolve(config, jax.device_count(), jax.default_backend())
    check_run_dir(config.run.dir)
    compile_cache.directory(config.run.cache_dir)
    mesh = meshes.make_mesh(config.mesh)

    # Data: checked before anything is written; read ahead, by each process its own rows.
    sources = sources_of(config.data)
    parts = data.open_parts(
        sources,
        vocab=config.model.vocab,
        tokenizer=config.data.tokenizer,
        eos=config.data.eos,
        seq_len=config.data.seq_len,
        eval_fraction=config.data.eval_fraction,
        packing=config.data.packing,
    )
    reading = {"rows": meshes.process_rows(mesh, config.batch_size), "prefetch": config.data.prefetch}
    evals = data.EvalBatches(data.all_held_out(parts), config.batch_size, config.data.eval_batches, **reading)
    samples = data.all_training(parts, [source.weight for source in sources])
    batches = data.batches(samples, config.batch_size, seed=config.seed, stop=config.steps, **reading)

    # The run: three specs per parameter, one compiled step.
    run = make_run(config, mesh)

    # From here on the run leaves traces.
    kept = compile_cache.use(config.run.cache_dir)
    run_dir = make_run_dir(config.run.dir)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})
    claim(run_dir, to_yaml(config))
    print("\n".join([*describe(config, run), *data.describe(parts, evals)]))
    print(f"files: {run_dir}" + (f"; compiled programs: {kept}" if kept else ""), flush=True)

    state = run.init()
    speed = watch.utilization(flops_per_token(config.model.decoder(config.precision.params), config.data.seq_len))
    with Journal(run_dir / "metrics.jsonl", config, speed) as journal:
        with journal.aside():
            journal.evaluated(0, *evaluations(run, state, evals, config))
        with watch.Trace(profile_steps(config), run_dir / "profile", journal.say, journal.aside) as trace:
            fit(run, state, batches, evals, config, journal, trace)
    print(journal.summary())
    journal.check()


def fit(
    run: jzero.Run,
    state: jzero.TrainState,
    batches: Iterable[data.Batch],
    evals: Iterable[data.Batch],
    config: Config,
    journal: Journal,
    trace: watch.Trace,
) -> jzero.TrainState:
    """The loop: dispatches steps, and reads the metrics of a step when later ones are on their way.

    Returns:
        The state after the last step.
    """
    waiting = Waiting(IN_FLIGHT)
    for step, batch in enumerate(batches, start=1):
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, metrics = run.step(state, run.put(batch))
        trace.dispatched(step, metrics)
        waiting.put(step, metrics)
        journal.trained(waiting.ready())
        if step % config.log.eval_every == 0 or step == config.steps:
            journal.trained(waiting.rest())
            with journal.aside():
                journal.evaluated(step, *evaluations(run, state, evals, config))
    return state


def evaluations(
    run: jzero.Run, state: jzero.TrainState, evals: Iterable[data.Batch], config: Config
) -> list[tuple[float, float]]:
    """`evaluate` of the weights and, if the run keeps one, of their average."""
    states = [state] if config.optim.ema is None else [state, run.averaged(state)]
    return [evaluate(run, each, evals) for each in states]


def evaluate(run: jzero.Run, state: jzero.TrainState, evals: Iterable[data.Batch]) -> tuple[float, float]:
    """(loss per token in nats, number of tokens) over all batches: the sum of losses over the sum of weights."""
    waiting, losses, weights = deque[Any](), [0.0], [0.0]

    def read() -> None:
        result = waiting.popleft()
        weights.append(float(result["weight"]))
        losses.append(float(result["loss"]) * weights[-1])

    for batch in evals:
        waiting.append(run.evaluate(state, run.put(batch)))
        if len(waiting) > IN_FLIGHT:  # a long evaluation does not wait in device memory
            read()
    while waiting:
        read()
    tokens = math.fsum(weights)
    return (math.fsum(losses) / tokens if tokens else math.nan), tokens


def sources_of(settings: Data) -> list[data.Source]:
    """What a config names to be read."""
    common: dict[str, Any] = {key: getattr(settings, key) for key in ("glob", "format", "text_key", "dtype")}
    if not settings.mixture:
        return [data.Source(path=settings.path, **common)]
    own = [source.model_dump(exclude_none=True) for source in settings.mixture]
    return [data.Source(**(common | keys), key="data.mixture") for keys in own]


def make_run(config: Config, mesh: jax.sharding.Mesh) -> jzero.Run:
    """The ZeRO run that a resolved config describes; no array is made."""
    precision, dtype = config.precision, config.precision.params
    # Made in float32 whatever the precision, so that the masters are not rounded; `setup` brings them to rest.
    sizes = config.model.decoder(dtype, config.comm.layers_ahead)
    try:
        return jzero.setup(
            lambda: Decoder(sizes, rngs=nnx.Rngs(config.seed)),
            next_token_loss,
            functools.partial(make_optimizer, config),
            mesh,
            data.shapes(config.batch_size, config.data.seq_len, config.data.packing),
            stage=config.stage,
            micro_batches=config.batch_size // ((config.micro_batch or 1) * meshes.data_size(mesh)),
            clip_norm=config.optim.clip_norm,
            precision=jzero.Precision(params=dtype, grads=precision.grads, reduce=precision.reduce),
            zero=jzero.Zero(**config.zero.model_dump()),
            comm=jzero.Comm(**config.comm.model_dump(exclude={"layers_ahead"})),
        )
    except ShardingError as error:  # a pattern that matches nothing, axes of one device
        raise ConfigError(str(error)) from error


def make_optimizer(config: Config, per_layer: Any) -> optax.GradientTransformation:
    """The optimizer that a resolved config describes.

    Args:
        per_layer: the parameters as layers read them.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """
    optim = config.optim
    schedule = jzero.make_schedule(
        optim.schedule, optim.lr or 0.0, optim.warmup_steps or 0, config.steps, optim.min_lr_ratio
    )
    plateau = optim.plateau_patience and optax.contrib.reduce_on_plateau(
        optim.plateau_factor,
        optim.plateau_patience,
        accumulation_size=optim.plateau_window,
        min_scale=optim.min_lr_ratio,
    )
    try:
        tx = jzero.make_optimizer(optim.name, schedule, per_layer, plateau=plateau or None, **optim.settings())
    except ValueError as error:
        raise ConfigError(f"optim.{error}") from None
    return tx if optim.ema is None else jzero.averaged(tx, optim.ema)


def start_cpu_devices() -> None:
    """Eight CPU devices for a machine without an accelerator, unless XLA_FLAGS already says how many.

    Has no effect on accelerators, nor once JAX has started its backends.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    try:
        jax.config.update("jax_num_cpu_devices", FAKE_DEVICES)
    except RuntimeError:
        return
    if jax.default_backend() == "cpu":
        print(
            f"no accelerator: {FAKE_DEVICES} fake CPU devices "
            "(another number: XLA_FLAGS=--xla_force_host_platform_device_count=N)"
        )


# The run directory.


def check_run_dir(name: str | None) -> None:
    """Refuses a directory that cannot take a new run; writes nothing.

    Raises:
        ConfigError: it holds a run, is not a directory, or cannot be written.
    """
    path = Path(name or "runs").absolute()
    try:
        path.exists()
    except OSError as error:
        raise ConfigError(f"run.dir = {name}: {error.strerror}") from None
    held = [f for f in ("config.yaml", "metrics.jsonl", "checkpoints") if name and (path / f).exists()]
    if held:
        raise ConfigError(f"run.dir = {name}: already holds a run ({', '.join(held)}); name a new directory")
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        raise ConfigError(f"run.dir = {name or path}: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir = {name or path}: {there} is not writable")


def make_run_dir(name: str | None) -> Path:
    """The directory of a new run, made; without a name it is runs/ and the time, and a number if that is taken.

    Raises:
        ConfigError: it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = [name] if name else [f"runs/{stamp}{suffix}" for suffix in ("", *(f"-{i}" for i in range(1, 100)))]
    for path in map(Path, names):
        try:
            path.mkdir(parents=True, exist_ok=name is not None)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run.dir = {path}: {error.strerror}") from None
    raise ConfigError(f"run.dir = {names[0]}: is taken, and so are {len(names) - 1} like it")


def claim(run_dir: Path, resolved: str) -> None:
    """Writes config.yaml, which makes the directory this run's and nobody else's.

    Raises:
        ConfigError: another run was quicker.
    """
    try:
        with (run_dir / "config.yaml").open("x", encoding="utf-8") as file:
            file.write(resolved)
    except FileExistsError:
        raise ConfigError(f"run.dir = {run_dir}: another run has just started there; name a new directory") from None


# What the run says.


def describe(config: Config, run: jzero.Run) -> list[str]:
    """The run before its first step: mesh, parameters, bytes of one device at rest, and what stayed whole."""
    at_rest = run.at_rest_bytes()
    parts = f"{run.micro_batches} microbatches" if run.micro_batches > 1 else "one microbatch"
    sequences = f"{config.batch_size} sequences of {config.data.seq_len} tokens a step, in {parts}"
    lines = [
        f"stage {config.stage} on mesh {config.mesh} ({jax.device_count()} x {jax.devices()[0].device_kind})",
        f"model: {_parameters(run):,} parameters in {config.precision.params}; {sequences}",
        f"at rest per device: {_mib(sum(at_rest.values()))}, of which "
        + ", ".join(f"{name} {_mib(size)}" for name, size in at_rest.items() if size)
        + f"; gradients add {_mib(run.grads_bytes())} during a step",
    ]
    lines.append(_describe_optimizer(config, run))
    if run.whole:
        total = sum(leaf.nbytes for leaf in run.whole)
        lines.append(f"whole on every device: {len(run.whole)} leaves, {_mib(total)} of parameters")
        lines += [f"  {leaf.path} {tuple(leaf.shape)} {leaf.nbytes:,} bytes: {leaf.reason}" for leaf in run.whole]
    return [*lines, *(f"note: {note}" for note in run.notes)]


def _describe_optimizer(config: Config, run: jzero.Run) -> str:
    optim = config.optim
    decayed = jax.tree.leaves(chains.matrices(run.per_layer))
    settings = ", ".join(f"{key} {value}" for key, value in optim.settings().items() if isinstance(value, int | float))
    text = (
        f"optimizer: {optim.name} (lr {optim.lr}, {settings}); weight decay on {sum(decayed)} of {len(decayed)} leaves"
    )
    if optim.adamw_leaves is not None:
        hidden = jax.tree.leaves(chains.hidden_matrices(run.per_layer, optim.adamw_leaves))
        text += f", {sum(hidden)} of them orthogonalised"
    return text if optim.ema is None else f"{text}; average of the weights, decay {optim.ema}"


def _parameters(run: jzero.Run) -> int:
    state = run.abstract_state
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((state.params, state.frozen)))


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
