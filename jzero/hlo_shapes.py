"""Shapes as HLO prints them, `(f32[2,3]{1,0}, s8[5])`, and how many bytes they take."""

import math
import re
from dataclasses import dataclass


class HloError(ValueError):
    """A compiled program holds something that cannot be read exactly."""


_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
_NO_BYTES = ("token", "opaque")


@dataclass(frozen=True)
class Array:
    """One array of a shape.

    Attributes:
        dtype: HLO's name, "f32", "bf16", "s8".
        dims: its dimensions; of a bounded one, the bound.
        layout: as printed, "{1,0}" or "".
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def printed(self) -> str:
        """As in "bf16[8,128]"."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes in memory, rounded up to whole ones.

        Raises:
            HloError: a dtype whose size is not known.
        """
        return -(-self.elements * self._bits // 8)

    @property
    def _bits(self) -> int:
        """Bits of one element: narrower than a byte only where the layout says that elements are packed."""
        if packed := re.search(r"\bE\((\d+)\)", self.layout):
            return int(packed[1])
        if self.dtype in _NO_BYTES:
            return 0
        width = re.match(r"(?:bf|[fsuc])(\d+)", self.dtype)
        if self.dtype != "pred" and not width:
            raise HloError(f"size of dtype {self.dtype!r} is not known")
        return max(8, int(width[1])) if width else 8


def in_host_memory(array: Array) -> bool:
    """Whether an array lies in the memory of the device's host, XLA's memory space 5."""
    return "S(5)" in array.layout


def arrays(shape: str) -> list[Array]:
    """All arrays of a shape, however deep in tuples, in order."""
    return [Array(dtype, _dims(dims), layout) for dtype, dims, layout in _ARRAY.findall(shape)]


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape.

    Raises:
        HloError: a dtype whose size is not known.
    """
    return sum(array.bytes for array in arrays(shape))


def tuple_parts(shape: str) -> list[str]:
    """The top-level elements of a tuple shape; [] for an array.

    Raises:
        HloError: it cannot be read.
    """
    parts, rest = [], re.sub(r"/\*.*?\*/", "", shape)[1:-1] if shape.startswith("(") else ""
    while rest := rest.lstrip(", "):
        array = _ARRAY.match(rest)
        end = closing(rest) if rest.startswith("(") else array.end() if array else -1
        if end < 0:
            raise HloError(f"cannot read the shape {shape!r}")
        parts.append(rest[:end])
        rest = rest[end:]
    return parts


def closing(text: str) -> int:
    """The position after the parenthesis that closes the one `text` starts with; -1 if none does."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return -1


def _dims(printed: str) -> tuple[int, ...]:
    return tuple(int(d.removeprefix("<=")) for d in printed.split(",") if d)
