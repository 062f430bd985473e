"""What a checkpoint's files were when it was complete: sizes, and checksums of the arrays.

Sizes are looked at before anything is read, by every process, and find what was truncated or is gone.  Checksums are
compared with those of the arrays that were read, and find the rest.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

_NAME = "seal.json"


class BrokenSealError(ValueError):
    """Files are not as they were; the message says which."""


def write(directory: Path, checksums: Mapping[str, int]) -> None:
    """Seals all files below `directory`, and waits until the seal is on the disk.

    Args:
        checksums: by the name of an array.
    """
    files = {str(path.relative_to(directory)): path.stat().st_size for path in _files(directory)}
    with (directory / _NAME).open("w", encoding="utf-8") as file:
        json.dump({"files": files, "checksums": dict(checksums)}, file)
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> dict[str, int]:
    """The checksums, if all files are there in full.

    Raises:
        BrokenSealError: one is missing or has another size.
    """
    try:
        seal = json.loads((directory / _NAME).read_text(encoding="utf-8"))
        files, checksums = dict(seal["files"]), dict(seal["checksums"])
    except FileNotFoundError:
        raise BrokenSealError(f"{_NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenSealError(f"{_NAME} cannot be read ({error})") from error
    for name, size in files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError:
            raise BrokenSealError(f"{name} is missing") from None
        if found != size:
            raise BrokenSealError(f"{name} has {found:,} bytes, not {size:,}")
    return checksums


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*/**/*") if path.is_file())
