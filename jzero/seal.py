"""What a checkpoint's files were when it was complete: sizes, digests of small files, and checksums of the arrays.

Sizes and digests are looked at before anything is read, by every process: they find what was truncated or is gone, and
every change of what says which arrays there are and what the run was.  Checksums are compared with those of the arrays
that were read, and find the rest.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

_NAME = "seal.json"
_DATA = "d"  # directories of array data, which the checksums are of


class BrokenSealError(ValueError):
    """Files are not as they were; the message says which."""


def write(directory: Path, checksums: Mapping[str, int]) -> None:
    """Seals all files below `directory`, and waits until the seal is on the disk.

    Args:
        checksums: by the name of an array.
    """
    files = {str(path.relative_to(directory)): _found(path) for path in _files(directory)}
    with (directory / _NAME).open("w", encoding="utf-8") as file:
        json.dump({"files": files, "checksums": dict(checksums)}, file)
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> dict[str, int]:
    """The checksums, if all files are as they were sealed.

    Raises:
        BrokenSealError: one is missing, has another size or digest, or cannot be read; or the seal is not there.
    """
    try:
        seal = json.loads((directory / _NAME).read_text(encoding="utf-8"))
        files = {name: [size, *digest] for name, (size, *digest) in dict(seal["files"]).items()}
        checksums = dict(seal["checksums"])
    except FileNotFoundError:
        raise BrokenSealError(f"{_NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenSealError(f"{_NAME} cannot be read ({error})") from error
    for name, sealed in files.items():
        try:
            found = _found(directory / name)
        except FileNotFoundError:
            raise BrokenSealError(f"{name} is missing") from None
        except (OSError, ValueError) as error:
            raise BrokenSealError(f"{name} cannot be read ({error})") from error
        if found[:1] != sealed[:1]:
            raise BrokenSealError(f"{name} has {found[0]} bytes, not {sealed[0]}")
        if found != sealed:
            raise BrokenSealError(f"{name} is not what was written")
    return checksums


def _found(path: Path) -> list[int | str]:
    """[size], and of a file that holds no array data [size, digest]."""
    if path.parent.name == _DATA:
        return [path.stat().st_size]
    content = path.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*/**/*") if path.is_file())
