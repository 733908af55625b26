"""Files: writes that are whole or not there at all, whenever the machine stops."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path


def partial(path: Path) -> Path:
    """Return where a directory or file is written before it gets its name."""
    return path.with_name(f".{path.name}.partial")


def replaced(path: Path) -> Path:
    """Return where a directory is kept while another takes its name."""
    return path.with_name(f".{path.name}.replaced")


def sync_directory(path: Path) -> None:
    """Bring a directory's names to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and bring it to the disk; FileExistsError if there is anything by its name.

    Nothing is written through a link.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whose name stands for the old or the new content at any time."""
    remove(partial(path))  # of a write that did not end
    write_file(partial(path), content)
    partial(path).replace(path)
    sync_directory(path.parent)


def begin_directory(path: Path) -> None:
    """Make the directory, new and empty, that is committed as ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial(path))  # of a save that did not end
    partial(path).mkdir()


def commit_directory(path: Path) -> None:
    """Give a finished directory its name, in place of what had it."""
    sync_directory(partial(path))
    if os.path.lexists(path):
        remove(replaced(path))
        path.rename(replaced(path))
    partial(path).rename(path)
    sync_directory(path.parent)
    remove(replaced(path))


def remove(path: Path) -> None:
    """Remove what is there, if anything: a link itself, and never what it leads to."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def discard(path: Path) -> None:
    """Remove what a failed save has left, as far as that goes; the next save removes the rest."""
    shutil.rmtree(path, ignore_errors=True)
