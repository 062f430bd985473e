"""What of an update is between rest and update: three groups at most, and at its end none."""

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Self

from jzero.offload.tiers import Arrived, Left

IN_FLIGHT = 3  # groups on the way in, at work and on the way out


@dataclass
class Flow:
    """What of the optimizer's state was under way between rest and update, as the stream counts it.

    Attributes:
        groups: the most at a time; nbytes, the most of them on one device.
        in_flight: now.
    """

    groups: int = 0
    nbytes: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)

    def begins(self, group: int, nbytes: int) -> None:
        """A group leaves its place of rest."""
        self.in_flight[group] = nbytes
        self.groups = max(self.groups, len(self.in_flight))
        self.nbytes = max(self.nbytes, sum(self.in_flight.values()))

    def ends(self, group: int) -> None:
        """A group is back at rest."""
        del self.in_flight[group]


class UnderWay:
    """The groups of one update that are between rest and update; at its end, however it ends, nothing is."""

    def __init__(self, flow: Flow) -> None:
        """None yet.

        Args:
            flow: is told of each.
        """
        self._flow, self._coming, self._leaving = flow, list[Arrived](), dict[int, list[Left]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            while self._leaving and error is None:
                self._first_is_gone()
        finally:
            # Else a thread would still write what the next state has in the same place.
            for wait in (*self._coming, *itertools.chain(*self._leaving.values())):
                with contextlib.suppress(Exception):  # the first error has been raised
                    wait()
            self._flow.in_flight.clear()

    def begins(self, group: int, nbytes: int) -> None:
        """A group is fetched, when there is room for it beside the one at work."""
        while len(self._leaving) >= IN_FLIGHT - 1:
            self._first_is_gone()
        self._flow.begins(group, nbytes)
        self._coming.clear()  # what came before has arrived

    def comes(self, arrived: Arrived) -> Arrived:
        """Something of the group that is fetched, as it is."""
        self._coming.append(arrived)
        return arrived

    def leaves(self, group: int, left: Left) -> None:
        """Something of a group is on its way to rest."""
        self._leaving.setdefault(group, []).append(left)

    def _first_is_gone(self) -> None:
        """Waits for the group that left first."""
        group = next(iter(self._leaving))
        for left in self._leaving[group]:
            left()
        del self._leaving[group]
        self._flow.ends(group)
