"""What of a run rests outside of the device, as a program says it."""

import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass

_CHOICES = {
    "optimizer": ("none", "device", "host", "nvme"),
    "update": ("device", "cpu"),
    "params": ("none", "host", "nvme"),
    "grads": ("none", "host"),
}
GROUP_BYTES = 2**28  # at 50 GB/s both ways a group is 5 ms on its way; three of them are little beside a model

MIN_PARAM_BYTES = 2**20  # a copy takes about 10 us however little it brings, in which 50 GB/s move half of that


@dataclass(frozen=True)
class Offload:
    """Where what a run holds rests between its uses (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity, Rajbhandari et al.
    2021).  Whatever is chosen, the arithmetic is the same.

    Attributes:
        optimizer: where the optimizer's state rests: "none", on the device, and is updated at once; "host", in pinned
            host memory; "nvme", in files; "device", on the device, but is updated in groups as if it were elsewhere.
        update: where the update is computed, on the "device" or on the host's "cpu".
        params: where parameters rest: "none", on the device; "host"; "nvme", in files.
        grads: where accumulated gradients rest: "none", on the device; "host", twice their size with microbatches.
        dir: of the files, one directory per disk.
        group_size: bytes on one device that are worked on together: of state, of gradients in float32, and of
            parameters that rest elsewhere.
        host_bytes: so much of one device's state in files stays in host memory.
        min_param_bytes: of one layer of a parameter; smaller ones, and their gradients, stay on the device, for which a
            copy has more overhead than bytes.  In files a layer takes 4,096 bytes at least.
    """

    optimizer: str = "none"
    update: str = "device"
    params: str = "none"
    grads: str = "none"
    dir: tuple[str, ...] = ()
    group_size: int = GROUP_BYTES
    host_bytes: int = 0
    min_param_bytes: int = MIN_PARAM_BYTES

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            _check_choice(key, getattr(self, key), choices)
        if not isinstance(self.dir, tuple):
            raise TypeError(f"offload.dir must be a tuple of directories, got {self.dir!r}")
        for key, least in (("group_size", 1), ("host_bytes", 0), ("min_param_bytes", 0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
                raise ValueError(f"offload.{key} = {value!r} must be a number of bytes, at least {least}")
        if self.update == "cpu" and self.optimizer not in ("host", "nvme"):
            raise ValueError(
                f"offload.update = cpu with offload.optimizer = {self.optimizer}: the state must rest outside "
                f"of the device; take offload.optimizer = host or nvme"
            )
        in_files = [key for key in ("optimizer", "params") if getattr(self, key) == "nvme"]
        if in_files and not self.dir:
            raise ValueError(f"offload.{in_files[0]} = nvme needs offload.dir, a directory on each disk to be used")
        if len({os.path.realpath(directory) for directory in self.dir}) != len(self.dir):
            raise ValueError(f"offload.dir = {self.dir!r} names a directory twice; name one on each disk")
        if self.dir and not in_files:
            raise ValueError(
                f"offload.dir = {self.dir!r} is for files: offload.optimizer is {self.optimizer}, offload.params "
                f"{self.params}"
            )
        if self.host_bytes and self.optimizer != "nvme":
            raise ValueError(
                f"offload.host_bytes = {self.host_bytes!r} is for state in files: offload.optimizer is {self.optimizer}"
            )

    @property
    def in_groups(self) -> bool:
        """Whether the optimizer is run group by group, as it is wherever something rests outside of the device: a step
        in one program would have all of it there."""
        return any(place != "none" for place in (self.optimizer, self.params, self.grads))


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value in choices:
        return
    delayed = " (an update that is one step late is not the same training)" if "delay" in str(value) else ""
    raise ValueError(f"offload.{key} = {value} is not one of {', '.join(choices)}{delayed}")
