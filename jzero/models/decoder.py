"""A decoder in Flax NNX that covers GPT-2 and the Llama, Mistral and Qwen family, by the fields of `DecoderConfig`.

An ordinary NNX model: it knows its tensor-parallel layout, because that is part of how it computes, and nothing of
how its parameters rest between steps.  Every parameter is read once per call, by indexing its Variable.

Shapes stand in names, `x_BxLxD`; products are written together, `HK` is one dim of size heads * head_dim:

    B  sequences                    V  vocabulary               H  query heads
    L  tokens of a sequence         D  width (residual stream)  G  key/value heads, H = G * queries per group
    N  layers                       F  width of the MLP         K  head size, D / H unless given

Tensor parallelism (Shoeybi et al. 2019, section 3): q, k, v, gate and up split their outputs over `tp` (whole heads),
o and down split their inputs, so that each half of a block ends in one all-reduce of x_BxLxD.  The embedding and the
table of learned positions split D, not V: a lookup is then local, the gradient rows of tokens that a batch lacks are
exactly zero, and any vocabulary fits.  An untied head splits V where `tp` divides it, else D.

Packed rows: with `segments` a token attends to its own document alone, and `positions` say where in it each token is.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.mesh import TP
from jzero.models.attention import tp_size, whole_over_tp
from jzero.models.blocks import Block, make_dropout, make_linear, normal
from jzero.models.decoder_config import DecoderConfig
from jzero.models.norms import make_norm
from jzero.models.positions import Rope, rotary_angles
from jzero.stack import UNSTACKED, scan_layers
from jzero.use import remat_policy


class Decoder(nnx.Module):
    """Maps int32 tokens [B, L] to float32 logits [B, L, V] of the next token.

    Layer i draws its initial values and its dropout masks from the i-th of N keys split from the streams of `rngs`,
    stacked or not: `scan=True` and `scan=False` compute the same function.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        rngs = _own_streams(config, rngs)
        self.embedding = _make_table(config, config.vocab, rngs)
        self.positions = _make_table(config, config.learned_positions, rngs) if config.learned_positions else None
        self.embedding_dropout = make_dropout(config, rngs)
        self.layers = _make_layers(config, rngs)
        self.norm = make_norm(config)
        if not config.tied:
            spec = (None, TP) if config.vocab % max(tp_size(), 1) == 0 else (TP, None)
            self.head = make_linear(config, config.width, config.vocab, spec, rngs=rngs)

    def __call__(
        self,
        tokens_BxL: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Logits float32[B, L, V]; those at position l depend on tokens 0 to l of the same segment alone.

        Args:
            tokens_BxL: int32.
            positions: of each token in its document, int32[B, L]; None: 0 to L - 1.
            segments: number of each token's document in its row, int32[B, L]; None: one document.

        Raises:
            ValueError: the table of learned positions is shorter than L.
        """
        table_VxD = self.embedding.embedding[...]  # one read, also where the head is tied to it
        positions_BxL = jnp.arange(tokens_BxL.shape[1])[None, :] if positions is None else positions
        x_BxLxD = self._embed(table_VxD, tokens_BxL, positions_BxL)
        x_BxLxD = self.embedding_dropout(whole_over_tp(x_BxLxD))
        x_BxLxD = self.norm(whole_over_tp(self._through_layers(x_BxLxD, self._angles(positions_BxL), segments)))
        logits_BxLxV = (
            jnp.einsum("bld,vd->blv", x_BxLxD, table_VxD.astype(x_BxLxD.dtype))
            if self.config.tied
            else self.head(x_BxLxD)
        )
        return logits_BxLxV.astype(jnp.float32)

    def _embed(self, table_VxD: jax.Array, tokens_BxL: jax.Array, positions_BxL: jax.Array) -> jax.Array:
        x_BxLxD = table_VxD[tokens_BxL].astype(self.config.dtype)
        if self.positions is None:
            return x_BxLxD
        rows_PxD = self.positions.embedding[...]
        if tokens_BxL.shape[1] > rows_PxD.shape[0]:
            raise ValueError(
                f"{tokens_BxL.shape[1]} tokens in a row, but learned_positions={rows_PxD.shape[0]}; make rows shorter"
            )
        return x_BxLxD + rows_PxD[positions_BxL].astype(self.config.dtype)

    def _angles(self, positions_BxL: jax.Array) -> jax.Array | None:
        c = self.config
        if c.learned_positions:
            return None
        rope = Rope(
            c.head_size,
            c.rope_theta,
            c.rope_scaling,
            c.rope_factor,
            c.rope_low_freq_factor,
            c.rope_high_freq_factor,
            c.rope_original_positions,
        )
        return rotary_angles(positions_BxL, rope)

    def _through_layers(
        self, x_BxLxD: jax.Array, angles_BxLxP: jax.Array | None, segments_BxL: jax.Array | None
    ) -> jax.Array:
        def run(block: Block, x: jax.Array, angles: jax.Array | None, segments: jax.Array | None) -> jax.Array:
            return block(x, angles, segments)

        if self.config.scan:
            ahead, remat = self.config.layers_ahead, self.config.remat
            return scan_layers(run, self.layers, x_BxLxD, angles_BxLxP, segments_BxL, layers_ahead=ahead, remat=remat)
        run = nnx.remat(run, policy=remat_policy(self.config.remat))
        for block in self.layers:
            x_BxLxD = run(block, x_BxLxD, angles_BxLxP, segments_BxL)
        return x_BxLxD


def _make_table(config: DecoderConfig, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(
        rows,
        config.width,
        embedding_init=normal((None, TP)),
        rngs=rngs,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
    )


def _own_streams(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Rngs:
    # Rngs(0) has one stream for all names: with dropout drawing from it, initial values would depend on the rate.
    streams = ["params", "dropout"] if config.dropout else ["params"]
    return nnx.Rngs(**{stream: rngs[stream]() for stream in streams})


def _make_layers(config: DecoderConfig, rngs: nnx.Rngs) -> Any:
    keys = {stream: jax.random.split(rngs[stream](), config.layers) for stream in rngs}

    def make(keys: dict[str, jax.Array]) -> Block:
        return Block(config, rngs=nnx.Rngs(**keys))

    if config.scan:
        return nnx.vmap(make, transform_metadata=UNSTACKED)(keys)
    return nnx.List([make({stream: key[i] for stream, key in keys.items()}) for i in range(config.layers)])


def next_token_loss(model: Decoder, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sum of the weighted cross-entropies in nats, and the sum of the weights; both float32 scalars.

    Args:
        model: maps tokens [B, L] to logits [B, L, V].
        batch: "tokens" int32[B, L + 1]; optionally "weights" float[B, L], one per *predicted* token, 1 where left out;
            optionally "positions" and "segments" int32[B, L], of the *input* tokens, which are handed to the model.

    Raises:
        ValueError: the shape of weights, positions or segments is not that of the predicted tokens.
    """
    inputs_BxL, targets_BxL = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    for name in ("weights", "positions", "segments"):
        if name in batch and batch[name].shape != targets_BxL.shape:
            raise ValueError(f"{name} have shape {batch[name].shape}, but {targets_BxL.shape} tokens are predicted")
    weights_BxL = batch["weights"].astype(jnp.float32) if "weights" in batch else jnp.ones(targets_BxL.shape)
    logits_BxLxV = model(inputs_BxL, **{name: batch[name] for name in ("positions", "segments") if name in batch})
    # A comparison instead of an indexed read: it stays local where V is split over tp.
    ids_V = jnp.arange(logits_BxLxV.shape[-1], dtype=targets_BxL.dtype)
    is_target_BxLxV = targets_BxL[..., None] == ids_V[None, None, :]
    target_BxL = jnp.sum(jnp.where(is_target_BxLxV, logits_BxLxV, 0.0), axis=-1)
    loss_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1) - target_BxL
    return jnp.sum(loss_BxL * weights_BxL), jnp.sum(weights_BxL)
