"""Lanes: what comes and goes with each group, the optimizer's state on one and parameters in files on another.

A lane of a group has pieces of arrays, which all rest in one place.  Arrays are known by a key: those of the
optimizer's state by the number of their leaf, parameters by their path.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jzero.offload.piece import Piece
from jzero.offload.pieces import Pieces
from jzero.offload.tiers import Arrived, Left, Tier


class Member(NamedTuple):
    """One piece of a lane.

    Attributes:
        key: of the array.
        number: of the piece among all of that array.
        piece: where it lies.
    """

    key: Any
    number: int
    piece: Piece


@dataclass(frozen=True)
class Lane:
    """What one group has on a lane.

    Attributes:
        tier: where it rests between two updates.
        group: its number, by which the tier knows it.
        members: its pieces, in the order in which an update takes them.
    """

    tier: Tier
    group: int
    members: tuple[Member, ...]

    @property
    def nbytes(self) -> int:
        """Of one device."""
        return sum(member.piece.shard_bytes for member in self.members)

    @property
    def keys(self) -> list[Any]:
        """Of each piece."""
        return [member.key for member in self.members]

    @property
    def fills(self) -> list[Callable[[Any], Any]]:
        """For each piece, as of `AbstractPieces`."""

        def fill(number: int, piece: Piece) -> Callable[[Any], Any]:
            return lambda shards: self.tier.fill(self.group, number, piece, shards)

        return [fill(number, member.piece) for number, member in enumerate(self.members)]

    def fetch(self, arrays: Mapping[Any, Pieces]) -> Arrived:
        """Begins to bring the pieces to the update, as `Tier.fetch`.

        Raises:
            ValueError: what is in files was overwritten.
            TierError: it cannot be read.
        """
        return self.tier.fetch(self.group, [arrays[member.key].parts[member.number] for member in self.members])

    def store(self, arrays: Sequence[Any]) -> tuple[list[Any], Left]:
        """Begins to bring what the update made of them to rest, as `Tier.store`.

        Raises:
            TierError: it cannot be written.
        """
        return self.tier.store(self.group, arrays)


def lanes(tiers: Sequence[Tier], groups: Sequence[Sequence[tuple[Any, Piece]]]) -> list[Lane]:
    """One lane of all groups.

    Args:
        tiers: of each group.
        groups: (key, piece) of what each has.
    """
    counted, found = Counter[Any](), list[Lane]()
    for k, (tier, pieces) in enumerate(zip(tiers, groups, strict=True)):
        members = []
        for key, piece in pieces:
            members.append(Member(key, counted[key], piece))
            counted[key] += 1
        found.append(Lane(tier, k, tuple(members)))
    return found


def gathered(rest: Iterable[tuple[Lane, Sequence[Any]]], make: Callable[..., Any] = Pieces) -> dict[Any, Any]:
    """Key -> array in pieces.

    Args:
        rest: each lane with its pieces at rest, group by group; or with what `make` takes in their place.
    """
    found: dict[Any, list[tuple[Piece, Any]]] = {}
    for lane, parts in rest:
        for member, part in zip(lane.members, parts, strict=True):
            found.setdefault(member.key, []).append((member.piece, part))
    return {
        key: make(own[0][0].whole, [piece.cut for piece, _ in own], [part for _, part in own])
        for key, own in found.items()
    }
