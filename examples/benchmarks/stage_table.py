"""What each stage holds and sends, read off programs compiled for 8 H100s that are not there.

The README's table.  A 6.7 B decoder (Llama-2-7B's sizes) in bfloat16, adamw with float32 master, m and v, one
microbatch of one sequence of 2,048 tokens per device, full rematerialisation.  Nothing is run and no GPU is needed:

    pip install -e '.[aot]'; python examples/benchmarks/stage_table.py [--layers 32] [--width 4096]

In a smaller model the embedding and the head, which are gathered once, are a larger part: stage 3 then sends less.
"""

import argparse
import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jzero
from jzero import hlo, targets
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss

DEVICES = 8


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--layers", type=int, default=32)
    cli.add_argument("--width", type=int, default=4096)
    args = cli.parse_args()
    mesh = jzero.make_mesh("dp=8", targets.gpu_devices("h100", DEVICES))
    print("GB (10^9 bytes) of one device, and bytes per parameter that it sends in a step, x N / (N - 1):")
    print("stage  params  optimizer  gradients  temporaries  sent, float32 reductions  sent, bfloat16 reductions")
    for stage in range(4):
        (run, program), (_, narrow) = (compiled(args, mesh, stage, reduce) for reduce in ("float32", "bfloat16"))
        rest, temporaries = run.at_rest_bytes(), hlo.memory(program).temp_bytes
        held = (rest["params"], rest["opt_state"], run.grads_bytes())
        sizes = "".join(f"{size / 1e9:>10.2f}" for size in held)
        sent = "".join(f"{per_parameter(run, p):>22.2f}" for p in (program, narrow))
        print(f"{stage:>5}{sizes}{temporaries / 1e9:>12.2f}{sent}")


def compiled(args: argparse.Namespace, mesh: jax.sharding.Mesh, stage: int, reduce: str):
    config = DecoderConfig(
        width=args.width, layers=args.layers, heads=32, kv_heads=32, mlp_width=args.width * 43 // 16, vocab=32_000,
        tied=False, remat="full", dtype="bfloat16",
    )  # fmt: skip
    run = jzero.setup(
        lambda: Decoder(config, rngs=nnx.Rngs(0)),
        next_token_loss,
        optax.adamw(1e-4),
        mesh,
        {"tokens": jax.ShapeDtypeStruct((DEVICES, 2049), jnp.int32)},
        stage=stage,
        clip_norm=1.0,
        precision=jzero.Precision(params="bfloat16", reduce=reduce),
    )
    return run, run.lower()["step"].compile(compiler_options=targets.COMPILER_OPTIONS)


def per_parameter(run: jzero.Run, program: jax.stages.Compiled) -> float:
    sent = sum(collective.wire_bytes for collective in hlo.collectives(program, run.mesh))
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(run.abstract_state.params))
    return sent / parameters * DEVICES / (DEVICES - 1)


if __name__ == "__main__":
    main()
