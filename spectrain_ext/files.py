"""Reads files up to a size limit, and writes files either completely or not at all."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

#: The index of a model whose weights are in several files, as in Hugging Face's tools.
MODEL_INDEX = "model.safetensors.index.json"

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def read_bounded(path: str | os.PathLike[str], largest: int) -> bytes:
    """Return the content of a plain file of at most ``largest`` bytes, without blocking."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{Path(path)}: expected a plain file")
        if status.st_size <= largest:
            with open(handle, "rb", closefd=False) as file:
                # read() allocates this much in advance
                content = file.read(status.st_size + 1)
            if len(content) <= largest:
                return content
    finally:
        os.close(handle)
    raise ValueError(f"{Path(path)}: expected at most {largest} bytes, got more")


def read_json(path: str | os.PathLike[str], largest: int) -> Any:
    content = read_bounded(path, largest)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{Path(path)}: expected JSON: {error}") from error


def finite(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, which JSON cannot represent."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def partial(path: Path) -> Path:
    """Return where a directory or file is written before it gets its name."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file for writing and reading; at the end of the block it is on the disk."""
    # Never an existing file, nor the target of a link.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(handle, "w+b") as file:
        yield file
        file.flush()
        os.fsync(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content atomically; FileExistsError for anything but a file or a link."""
    if os.path.lexists(path) and not (path.is_file() or path.is_symlink()):
        raise FileExistsError(errno.EEXIST, "expected a plain file", str(path))
    remove(partial(path))  # from a write that was interrupted
    try:
        with new_file(partial(path)) as file:
            file.write(content)
        partial(path).replace(path)
    except BaseException:
        remove(partial(path))
        raise
    sync_directory(path.parent)


def replaced(path: Path) -> Path:
    """Return where a directory is between the two renames that replace it."""
    return path.with_name(f".{path.name}.replaced")


def present(path: Path) -> Path:
    """Return where a directory is that may have been left between these renames."""
    old = replaced(path)
    left = not os.path.lexists(path) and os.path.isdir(old) and not os.path.islink(old)
    return old if left else path


def replace_directory(path: Path) -> None:
    """Rename the partial directory to ``path``; a directory that is there becomes the partial one.

    At every moment, ``present(path)`` is one of the two.
    """
    if not os.path.lexists(path):
        partial(path).rename(path)
    elif not exchanged(partial(path), path):
        remove(replaced(path))
        path.rename(replaced(path))
        partial(path).rename(path)
        replaced(path).rename(partial(path))


def exchanged(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the system or the file system cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc 2.28
    names = os.fsencode(one), os.fsencode(other)
    return call is not None and call(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0


def sync_directory(path: Path) -> None:
    """Write a directory's entries to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, directory or link, if it exists; a link's target stays."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        path.unlink()
