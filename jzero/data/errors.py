"""What can be wrong with data: before a run, and under way."""


class DataError(ValueError):
    """Data that cannot be trained on; the message names the path and what is wrong there, in one line."""


class ChangedError(OSError):
    """A file that is no longer what it was when the run began; the message names it."""


def unreadable(what: object, error: OSError) -> DataError:
    """`error` as one line about `what`, a path or the setting that names it."""
    return DataError(f"{what}: {str(error.strerror).lower()}")
