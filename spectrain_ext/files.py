"""Reads files up to a size limit, and writes files either completely or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

#: The index of a model whose weights are in several files, as in Hugging Face's tools.
MODEL_INDEX = "model.safetensors.index.json"


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


def write_new(path: Path, content: bytes) -> None:
    """Write a file, to the disk; FileExistsError for one that exists, and for a link."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content atomically; FileExistsError for anything but a file or a link."""
    if os.path.lexists(path) and not (path.is_file() or path.is_symlink()):
        raise FileExistsError(errno.EEXIST, "expected a plain file", str(path))
    recover(path)
    draft = new_draft(path)
    try:
        write_new(draft, content)
        draft.replace(path)
    except BaseException:
        remove(draft)
        raise
    sync_directory(path.parent)


# Drafts. A file or directory has another name until it is complete, which only its writer uses.

_LEFT = re.compile(r"\.(.+)\.([0-9a-f]{8})-([0-9]{1,9})-[0-9a-f]{8}\.(?:partial|replaced)")
_OLD = 24 * 3600.0  # seconds without a change after which no writer is expected to go on


def new_draft(path: Path) -> Path:
    """Return a new name beside ``path`` that tells who writes: host, process, random number."""
    return path.with_name(f".{path.name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.partial")


def _host() -> str:
    """Return a digest of the host's name and of the container that numbers its processes."""
    container = ""
    with suppress(OSError):
        container = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {container}".encode()).hexdigest()[:8]


def replace_directory(path: Path, draft: Path) -> None:
    """Give a draft its name; if a directory has that name, then the draft's names it afterwards.

    Where the kernel or the file system cannot exchange names, it takes two renames, between which
    only ``present`` finds the directory that is being replaced.
    """
    while True:
        with suppress(OSError):
            return _exchange(draft, path)
        with suppress(FileNotFoundError):
            path.rename(_replaced(draft))
        try:
            draft.rename(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            remove(_replaced(draft))  # another writer was faster: replace what it wrote


def _exchange(one: Path, other: Path) -> None:
    """Exchange two names atomically."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an old C library
        raise OSError(errno.ENOSYS, "no renameat2") from None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(here, os.fsencode(one), here, os.fsencode(other), exchange):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def _replaced(draft: Path) -> Path:
    """Return where a directory is between the two renames that replace it by a draft."""
    return draft.with_suffix(".replaced")


def present(path: Path) -> Path:
    """Return where a directory is that may be, or have been left, between these renames."""
    left = [] if os.path.lexists(path) else _leftovers(path.parent).get(path, [])
    return next((each for each in left if _was_replaced(each)), path)


def _was_replaced(left: Path) -> bool:
    return left.suffix == ".replaced" and left.is_dir() and not left.is_symlink()


def identity(path: Path) -> object:
    """Return what differs after a directory has been replaced; None if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def recover(path: Path) -> None:
    """Remove the drafts of writers that have ended, or give what they replaced its name back."""
    for left in _leftovers(path.parent).get(path, ()):
        if _has_ended(left):
            discard(path, left.with_suffix(".partial"))


def discard(path: Path, draft: Path) -> None:
    """Try to remove a draft, or what it has replaced, which gets its name back if none has it."""
    old = _replaced(draft)
    with suppress(OSError):
        if not os.path.lexists(path) and _was_replaced(old):
            old.rename(path)
    for left in (draft, old):
        with suppress(OSError):
            remove(left)


def interrupted(directory: Path) -> list[Path]:
    """Return the paths beside which there are drafts."""
    return list(_leftovers(directory))


def _leftovers(directory: Path) -> dict[Path, list[Path]]:
    """Return the drafts, and what they have replaced, of every path; the newest first."""
    found: list[tuple[float, Path, Path]] = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            match = _LEFT.fullmatch(entry.name)
            with suppress(OSError):  # its writer removes it
                if match is not None:
                    changed = entry.stat(follow_symlinks=False).st_mtime
                    found.append((changed, directory / match[1], directory / entry.name))
    left: dict[Path, list[Path]] = {}
    for _, path, each in sorted(found, reverse=True):
        left.setdefault(path, []).append(each)
    return left


def _has_ended(left: Path) -> bool:
    """Return whether a draft's writer is known to be dead, or has not written for long."""
    match = _LEFT.fullmatch(left.name)
    if match is not None and match[2] == _host():
        try:
            os.kill(int(match[3]), 0)
        except ProcessLookupError:
            return True
        except OSError:  # another user's process
            pass
    try:
        inside = [] if left.is_symlink() or not left.is_dir() else list(left.iterdir())
        return time.time() - max(each.lstat().st_mtime for each in (left, *inside)) > _OLD
    except OSError:
        return False


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
