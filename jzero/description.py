"""What a run says of itself before its first step."""

import jax

from jzero import chains
from jzero.config import Config
from jzero.run import Run


def describe(config: Config, run: Run) -> list[str]:
    """The run before its first step: mesh, parameters, bytes of one device at rest, and what stayed whole."""
    at_rest = run.at_rest_bytes()
    parts = f"{run.micro_batches} microbatches" if run.micro_batches > 1 else "one microbatch"
    sequences = f"{config.batch_size} sequences of {config.data.seq_len} tokens a step, in {parts}"
    lines = [
        f"stage {config.stage} on mesh {config.mesh} ({jax.device_count()} x {jax.devices()[0].device_kind})",
        f"model: {run.parameters:,} parameters in {config.precision.params}; {sequences}",
        f"at rest per device: {size(sum(at_rest.values()))}, of which "
        + ", ".join(f"{name} {size(n)}" for name, n in at_rest.items() if n)
        + f"; gradients add {size(run.grads_bytes())} during a step",
    ]
    lines += _elsewhere(run)
    lines.append(_describe_optimizer(config, run))
    if run.whole:
        total = sum(leaf.nbytes for leaf in run.whole)
        lines.append(f"whole on every device: {len(run.whole)} leaves, {size(total)} of parameters")
        lines += [f"  {leaf.path} {tuple(leaf.shape)} {leaf.nbytes:,} bytes: {leaf.reason}" for leaf in run.whole]
    return [*lines, *(f"note: {note}" for note in run.notes)]


def _elsewhere(run: Run) -> list[str]:
    """What rests outside of the device, a line for each tier."""
    rest = run.tier_bytes()
    lines = []
    for tier, words in (("host", "host memory"), ("nvme", "files")):
        found = {name: tiers[tier] for name, tiers in rest.items() if tiers.get(tier)}
        if found:
            parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in found.items())
            total = sum(found.values())
            here = f"{size(total * jax.local_device_count())} for the devices of a process"
            lines.append(f"at rest in {words}, of each device: {size(total)}, of which {parts}; {here}")
    return lines


def _describe_optimizer(config: Config, run: Run) -> str:
    optim = config.optim
    matrices = jax.tree.leaves(chains.matrices(run.per_layer))
    decayed = sum(matrices) if optim.weight_decay else 0
    settings = ", ".join(f"{key} {value}" for key, value in optim.settings().items() if isinstance(value, int | float))
    decay = f"weight decay on {decayed or 'none'} of {len(matrices)} leaves"
    text = f"optimizer: {optim.name} (lr {optim.lr}, {settings}); {decay}"
    if optim.adamw_leaves is not None:
        hidden = jax.tree.leaves(chains.hidden_matrices(run.per_layer, optim.adamw_leaves))
        text += f", {sum(hidden)} orthogonalised"
    return text if optim.ema is None else f"{text}; average of the weights, decay {optim.ema}"


def size(nbytes: int) -> str:
    """Bytes for a reader."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
