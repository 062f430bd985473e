"""Which devices take part in a collective together: the spellings of XLA's replica groups, as arrays.

An HLO instruction names its groups in its attributes, in one of three spellings, or as pairs for a permute.  Members
are numbers of partitions, that is positions in the flattened mesh, never `device.id`.
"""

import math
import re

import numpy as np

# Each ends at the next attribute: a suffix that is not known must not be taken for the end of a known spelling.
_LISTED = re.compile(r"\{((?:\{[\d, ]*\}(?:, ?)?)*)\}(?=,|$)")
_TILED = re.compile(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)(?=,|$)")
_ON_MESH = re.compile(r"mesh\[([^\]]+)\](?:, device_ids=\(([^{]*)\))? ?\{([^}]*)\}(?=,|$)")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\s*\d+\}(?:,\s*)?)*)\}")


def replica_groups(attributes: str, devices: int) -> np.ndarray:
    """Members of each group as int[groups, group size], from an instruction's attributes; each device is in one group.

    Args:
        attributes: ``"channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}"``; without any it is one group of all.
        devices: of the whole program.

    Raises:
        ValueError: a spelling that is not known, or groups that do not part the devices.
    """
    spelled = attributes.partition("replica_groups=")[2] or "{}"
    try:
        groups = _groups(spelled, devices)
    except (ValueError, KeyError) as error:
        raise ValueError(f"cannot read the replica groups {spelled[:80]!r}: {error}") from error
    if not np.array_equal(np.sort(groups, axis=None), np.arange(devices)):
        raise ValueError(
            f"the replica groups {spelled[:80]!r} do not part {devices} devices: "
            "is this the mesh that the program was compiled for?"
        )
    return groups


def source_target_pairs(attributes: str, devices: int) -> np.ndarray:
    """Who sends to whom in a permute, as int[pairs, 2] of (from, to).

    Raises:
        ValueError: no pairs that can be read, or a device beyond `devices`.
    """
    found = _PAIRS.search(attributes)
    if not found:
        raise ValueError(f"no source_target_pairs that can be read in {attributes[:120]!r}")
    pairs = np.array([_ints(pair) for pair in re.findall(r"\{([^{}]+)\}", found[1])], int).reshape(-1, 2)
    if pairs.size and pairs.max() >= devices:
        raise ValueError(f"a permute reaches device {pairs.max()}, the mesh has {devices}")
    return pairs


def _groups(spelled: str, devices: int) -> np.ndarray:
    """Reads the three spellings; what follows the groups in `spelled` is left alone."""
    if found := _LISTED.match(spelled):  # {{0,2},{1,3}}; {} is one group of all
        return np.array([_ints(g) for g in re.findall(r"\{([^{}]*)\}", found[1])] or [range(devices)])
    if found := _TILED.match(spelled):  # [4,2]<=[8], [4,2]<=[2,4]T(1,0)
        return _ids(found[2]).reshape(_ints(found[1]))
    if found := _ON_MESH.match(spelled):  # mesh['a'=2,'b'=4] {'b'}
        named = (axis.rsplit("=", 1) for axis in found[1].replace("'", "").split(","))
        sizes = {name.strip(): int(size) for name, size in named}
        ids = _ids(found[2] or f"[{math.prod(sizes.values())}]")
        return _along(ids, sizes, [axis.strip() for axis in found[3].replace("'", "").split(",") if axis.strip()])
    raise ValueError("unknown spelling")


def _ids(spelled: str) -> np.ndarray:
    """Flat device ids from `[2,4]T(1,0)` (0..7 in that shape, transposed) or `0,2,1,3`."""
    if found := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", spelled):
        dims = _ints(found[1])
        return np.arange(math.prod(dims)).reshape(dims).transpose(_ints(found[2] or "") or None).ravel()
    return np.array(_ints(spelled))


def _along(ids: np.ndarray, sizes: dict[str, int], axes: list[str]) -> np.ndarray:
    """Groups along mesh axes, or along a factor of one: `b:(p)s` sees axis b as p × s × rest and spans only s of it."""
    factors: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for axis in axes:
        name, _, part = axis.partition(":(")
        factors[name].append((int(part.split(")")[0]), int(part.split(")")[1])) if part else (1, sizes[name]))
    dims, spanned = [], []
    for name, size in sizes.items():
        seen = 1
        for before, factor in sorted(factors[name]):
            spanned.append(len(dims) + 1)
            dims += [before // seen, factor]
            seen = before * factor
        dims.append(size // seen)
    others = [d for d in range(len(dims)) if d not in spanned]
    return ids.reshape(dims).transpose(others + spanned).reshape(-1, math.prod(dims[d] for d in spanned))


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]
