"""Plain files out of a tar archive, compressed or not: read as a stream, never unpacked.

Links, devices and directories are passed over, and a name is only ever compared. ``tarfile`` takes
a header of any size into memory, and goes round in circles in some archives.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_BLOCK = 512
_READ = 1 << 16
_READ_XZ = 1 << 13  # what is left behind a stream is copied, and there may be many small ones
_LARGEST_ARCHIVE = 1 << 30  # bytes, decompressed
_LARGEST_NAME = 1 << 16
_XZ_MEMORY = 1 << 28  # bytes of a dictionary; the best compression of xz needs 2**26
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_PAX_PATH = re.compile(rb"(?:^|\n)[0-9]+ path=([^\n]*)\n")


def tar_files(
    path: Path, wanted: Callable[[str], bool], *, largest: int
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the plain files that are ``wanted`` by their names, in order.

    Raises:
        OSError: the archive cannot be read.
        ValueError: it is no whole tar file, a wanted file has more than ``largest`` bytes, or all
            of it has more than 1 GiB.
    """
    try:
        with open(path, "rb") as file:
            yield from _files(_Stream(_decompressed(file)), wanted, largest)
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: expected a whole tar file, but {error}") from error
    except _NotWhole as error:
        raise ValueError(f"{path}: expected a whole tar file, but {error}") from None


class _NotWhole(Exception):
    """What an archive has that it should not have."""


class _Stream:
    """Takes as many bytes as are asked for from blocks of any size."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._buffer = bytearray()
        self._left = _LARGEST_ARCHIVE

    def _more(self) -> bool:
        block = next(self._blocks, None)
        if block is None:
            return False
        self._left -= len(block)
        if self._left < 0:
            raise _NotWhole(f"it has more than {_LARGEST_ARCHIVE} bytes")
        self._buffer += block
        return True

    def take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not self._more():
                raise _NotWhole("it is cut short")
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def skip(self, size: int) -> None:
        while size > len(self._buffer):
            size -= len(self._buffer)
            self._buffer.clear()
            if not self._more():
                raise _NotWhole("it is cut short")
        del self._buffer[:size]

    def finish(self) -> None:
        """Read to the end, where compressed files have their check sums."""
        self._buffer.clear()
        while self._more():
            self._buffer.clear()


def _files(
    stream: _Stream, wanted: Callable[[str], bool], largest: int
) -> Iterator[tuple[str, bytes]]:
    long_name: bytes | None = None
    while any(header := stream.take(_BLOCK)):
        kind, size = _checked(header)
        padding = -size % _BLOCK
        if kind in b"Lx":  # a name that is too long for the header that comes next
            if size > _LARGEST_NAME:
                raise _NotWhole(f"it has a name of {size} bytes")
            content = stream.take(size)
            if kind == b"x":
                found = _PAX_PATH.search(content)
                long_name = found[1] if found else long_name
            else:
                long_name = content.rstrip(b"\0")
            stream.skip(padding)
            continue
        if kind in b"123456":  # links, devices, directories: no content, whatever the size says
            long_name = None
            continue
        if kind == b"S":
            raise _NotWhole("it has a sparse file")
        name = (_short_name(header) if long_name is None else long_name).decode("utf-8", "replace")
        if kind in b"0\x007" and wanted(name):
            if size > largest:
                raise _NotWhole(f"{name!r} has {size} bytes, more than {largest}")
            yield name, stream.take(size)
        else:
            stream.skip(size)
        if kind not in b"gK":
            long_name = None
        stream.skip(padding)
    stream.finish()


def _checked(header: bytes) -> tuple[bytes, int]:
    """Type and size, if the header's sum is what it says."""
    size, total = _OCTAL.fullmatch(header[124:136]), _OCTAL.fullmatch(header[148:156])
    found = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if size is None or total is None or int(total[1] or b"0", 8) != found:
        raise _NotWhole("a header is damaged")
    return header[156:157], int(size[1] or b"0", 8)


def _short_name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    # GNU tar keeps other things where POSIX has the prefix
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _decompressed(file: IO[bytes]) -> Iterator[bytes]:
    start = file.read(6)
    file.seek(0)
    if start == b"\xfd7zXZ\0":
        return _unpacked_xz(file)
    source: IO[bytes] = file
    if start[:2] == b"\x1f\x8b":
        source = gzip.GzipFile(fileobj=file)  # type: ignore[assignment]
    elif start[:3] == b"BZh":
        source = bz2.BZ2File(file)
    return iter(lambda: source.read(_READ), b"")


def _unpacked_xz(file: IO[bytes]) -> Iterator[bytes]:
    """lzma's own file object sets no limit to memory, and a header may ask for 4 GiB."""
    decoder = None
    data = b""
    while True:
        if decoder is None or decoder.eof:
            data = (decoder.unused_data if decoder else b"").lstrip(b"\0")
            while not data:
                block = file.read(_READ_XZ)
                if not block:
                    return
                data = block.lstrip(b"\0")  # between two streams
            decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
        elif decoder.needs_input:
            data = file.read(_READ_XZ)
            if not data:
                raise EOFError("it is cut short")
        yield decoder.decompress(data, _READ)
        data = b""
