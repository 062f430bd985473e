"""How many floating point operations an instruction is: of matrix products, convolutions and cuDNN's attention.

A multiplication and an addition are two.  Attention counts whole rows, also where a causal kernel or one with a window
skips what is masked, as `jzero.models.flops` does.
"""

import json
import math
import re
from collections.abc import Callable

from jzero.hlo_shapes import Array, HloError
from jzero.hlo_text import Instruction

_OTHER_MATMUL = re.compile(r"gemm|matmul|\$conv|fmha", re.IGNORECASE)

#: (instruction, its operands, its first result) -> FLOPs
Rule = Callable[[Instruction, list[Array], Array], int]


def rule(i: Instruction) -> Rule | None:
    """How to count the FLOPs of an instruction; None where it multiplies no matrices.

    Raises:
        HloError: a library's call that multiplies matrices in a way that is not known.
    """
    target = i.custom_call_target
    for found, counts in (
        (i.opcode == "dot", _dot),
        (i.opcode == "convolution", _convolution),
        (target.startswith("__cublas$"), _cublas),
        (target.startswith("__cudnn$conv"), _cudnn_convolution),
        (target.startswith("__cudnn$fmha"), _attention),
    ):
        if found:
            return counts
    if _OTHER_MATMUL.search(target):
        raise HloError(f"instruction {i.name}: no rule for counting the FLOPs of {target!r}")
    return None


def _dot(i: Instruction, operands: list[Array], result: Array) -> int:
    found = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    dims = [int(d) for d in found[1].split(",") if d] if found else []
    return 2 * result.elements * math.prod(operands[0].dims[d] for d in dims)


def _cublas(i: Instruction, operands: list[Array], result: Array) -> int:
    config = _backend_config(i)
    numbers = config.get("gemm_backend_config", config).get("dot_dimension_numbers")
    if numbers is None:
        raise HloError(f"instruction {i.name}: no dot_dimension_numbers in its backend_config")
    contracted = math.prod(operands[0].dims[int(d)] for d in numbers.get("lhs_contracting_dimensions", []))
    return 2 * result.elements * contracted


def _attention(i: Instruction, operands: list[Array], result: Array) -> int:  # noqa: ARG001 (a rule)
    """Forward is two products of [tokens, tokens, head size] for each head, backward five."""
    shape = _backend_config(i).get("cudnn_fmha_backend_config", {}).get("intermediate_tensor_shape", {})
    scores = [int(d) for d in shape.get("dimensions", [])]
    if len(scores) != 4:
        raise HloError(f"instruction {i.name}: no shape of the attention scores in its backend_config")
    head_size = operands[0].elements // math.prod(scores[:3])
    return 2 * (5 if "Backward" in i.custom_call_target else 2) * math.prod(scores) * head_size


def _convolution(i: Instruction, operands: list[Array], result: Array) -> int:
    return _convolve(i, result, operands[1])


def _cudnn_convolution(i: Instruction, operands: list[Array], result: Array) -> int:
    if "BackwardFilter" in i.custom_call_target:
        return _convolve(i, operands[1], result)
    return _convolve(i, operands[0] if "BackwardInput" in i.custom_call_target else result, operands[1])


def _convolve(i: Instruction, output: Array, kernel: Array) -> int:
    """Each element of the output sums over the kernel of its feature."""
    found = re.search(r"\bdim_labels=\w+_(\w+)->", i.attributes)
    if not found:
        raise HloError(f"instruction {i.name}: no dim_labels")
    return 2 * output.elements * kernel.elements // max(kernel.dims[found[1].index("o")], 1)


def _backend_config(i: Instruction) -> dict:
    _, found, config = i.free_text.partition("backend_config=")
    try:
        return json.JSONDecoder().raw_decode(config)[0] if found else {}
    except json.JSONDecodeError as error:
        raise HloError(f"instruction {i.name}: cannot read its backend_config: {error}") from error
