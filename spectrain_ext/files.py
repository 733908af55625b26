"""Files: those of others are read within bounds, our own are whole or not there at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

#: Of a model whose weights are in several files, as Hugging Face's tools have it.
MODEL_INDEX = "model.safetensors.index.json"


def read_bounded(path: str | os.PathLike[str], largest: int) -> bytes:
    """Return a file's content; a pipe or a device is not waited for."""
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


def read_text(path: str | os.PathLike[str], largest: int) -> str:
    try:
        return read_bounded(path, largest).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{Path(path)}: expected text in UTF-8: {error}") from error


def read_json(path: str | os.PathLike[str], largest: int) -> Any:
    content = read_bounded(path, largest)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{Path(path)}: expected JSON: {error}") from error


def finite(value: Any) -> Any:
    """The same with None for every number that is not finite, which JSON cannot hold."""
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
    """A file to write, and read again, which is on the disk at the end of the block."""
    # Never what is there already, or what a link leads to.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(handle, "w+b") as file:
        yield file
        file.flush()
        os.fsync(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whose name stands for the old or the new content at any time."""
    remove(partial(path))  # of a write that did not end
    try:
        with new_file(partial(path)) as file:
            file.write(content)
        partial(path).replace(path)
    except BaseException:
        remove(partial(path))
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring a directory's names to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
