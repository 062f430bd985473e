"""What would make a plan fit that does not."""

import math

from jzero import gpus
from jzero.mesh import TP
from jzero.plan.report import Plan
from jzero.zero import STAGES

_OPTIMIZER = ("master", "m", "v", "other optimizer state")


def remedies(plan: Plan, margin: float) -> str:
    """In words; more devices help as far as what they share is what takes the room.

    Args:
        margin: part of a device's memory that is to stay free.
    """
    usable = (plan.capacity_bytes or 0) * (1 - margin)
    memory = plan.memory
    shared = memory.at_rest_bytes + memory.bytes_of("gradients")
    fixed = memory.peak_bytes - shared
    data_parallel = plan.devices // plan.mesh.get(TP, 1)
    words: list[str] = []
    state = sum(memory.bytes_of(name) for name in _OPTIMIZER)
    if state > 0.05 * memory.peak_bytes:
        words.append("offload.optimizer host")
    if memory.bytes_of("parameters") > 0.05 * memory.peak_bytes:
        words.append("offload.params host")
    if plan.stage < max(STAGES) and data_parallel > 1:
        words.append("a higher stage")
    elif usable > fixed > 0:
        words.append(f"stage 3 on about {math.ceil(plan.devices * shared / (usable - fixed)):,} devices like these")
    else:
        words.append(f"stage 3 on more than {math.ceil(plan.devices * shared / max(usable, 1)):,} devices like these")
    large = [name for name, gpu in gpus.GPUS.items() if gpu.memory_bytes * (1 - margin) >= memory.peak_bytes]
    if large:
        words.append(
            f"as many GPUs with at least {memory.peak_bytes / (1 - margin) / 1e9:,.1f} GB ({', '.join(large)})"
        )
    if plan.devices > 1 and plan.mesh.get(TP, 1) < plan.devices:
        words.append("a larger tp")
    if shared < usable:  # else activations are not what is too much
        words += [] if plan.label.get("remat") == "full" else ["model.remat full"]
        words += ["a smaller micro_batch"] if plan.rows > data_parallel * plan.micro_batches else []
        words.append("shorter sequences")
    return f"what would fit: {'; '.join(words)}"
