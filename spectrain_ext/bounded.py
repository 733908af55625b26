"""Files that somebody else may have made: read whole, if they are plain files and not too large."""

import json
import os
import stat
from pathlib import Path
from typing import Any


def read_bounded(path: str | os.PathLike[str], largest: int) -> bytes:
    """Return a file's content; a pipe or a device is not waited for.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no plain file, or has more than ``largest`` bytes.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{Path(path)}: expected a plain file")
        if status.st_size <= largest:
            with open(handle, "rb", closefd=False) as file:
                # as much memory is taken beforehand
                content = file.read(status.st_size + 1)
            if len(content) <= largest:
                return content
    finally:
        os.close(handle)
    raise ValueError(f"{Path(path)}: expected at most {largest} bytes, got more")


def read_json(path: str | os.PathLike[str], largest: int) -> Any:
    """Return what a JSON file of at most ``largest`` bytes holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else, or nested too deeply.
    """
    content = read_bounded(path, largest)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{Path(path)}: expected JSON: {error}") from error
