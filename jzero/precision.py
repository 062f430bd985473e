"""In which dtype things are held and sent."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Precision:
    """In which dtype things are held and sent.

    Attributes:
        params: of parameters at rest, in use, and on the wire; None leaves what the model made.  Whatever it is, the
            optimizer's m, v and master are float32.
        grads: of accumulated gradients.
        reduce: of gradients on the wire.
    """

    params: str | None = None
    grads: str = "float32"
    reduce: str = "float32"

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if not (_is_floating(dtype) or (name == "params" and dtype is None)):
                raise ValueError(f"precision.{name}={dtype!r} is no floating-point dtype; use 'bfloat16' or 'float32'")


def _is_floating(dtype: Any) -> bool:
    try:
        return dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False
