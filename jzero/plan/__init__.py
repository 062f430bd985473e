"""What a run will hold, send and take, before it runs: read off its compiled program, for GPUs that need not be here.

    run = jzero.setup(model_fn, loss_fn, tx, jzero.make_mesh("dp=8", targets.gpu_devices("h100", 8)), batch)
    plan = jzero.plan.of(run, targets.parse("h100"))
    print(jzero.plan.text.describe(plan))

`python -m jzero.plan` does this for the built-in decoder, with the flags of `jzero.train`.
"""

from jzero.plan import text
from jzero.plan.estimate import Estimate, Share, Tokens
from jzero.plan.memory import Memory, Part
from jzero.plan.report import Plan, of
from jzero.plan.traffic import Sent, Traffic

__all__ = ["Estimate", "Memory", "Part", "Plan", "Sent", "Share", "Tokens", "Traffic", "of", "text"]
