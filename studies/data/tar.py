"""Reads plain files from a tar archive, compressed or not, without unpacking it.

Links, devices and directories are skipped, and names are only compared.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

_BLOCK = 512
_READ = 1 << 16
_LARGEST_ARCHIVE = 1 << 30  # bytes, decompressed


def tar_files(
    path: Path, wanted: Callable[[str], bool], *, largest: int
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the plain files with a ``wanted`` name, in order."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                _check_end(member.offset_data + member.size)
                if member.isfile() and not member.issparse() and wanted(member.name):
                    if member.size > largest:
                        raise tarfile.ReadError(
                            f"{member.name!r} has {member.size} bytes, more than {largest}"
                        )
                    content = archive.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()
            _finish(archive)
    except (
        tarfile.TarError,
        EOFError,
        lzma.LZMAError,
        zlib.error,
        OverflowError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: expected a whole tar file, but {error}") from error


def _finish(archive: tarfile.TarFile) -> None:
    """Check the rest: tarfile stops silently at a damaged header and ignores trailing checksums."""
    file = archive.fileobj
    assert file is not None
    file.seek(archive.offset)
    end = file.read(_BLOCK)
    if len(end) < _BLOCK or any(end):
        raise tarfile.ReadError("a header is damaged, or it is cut short")
    while file.read(_READ):
        _check_end(file.tell())


def _check_end(at: int) -> None:
    if at > _LARGEST_ARCHIVE:
        raise tarfile.ReadError(f"it has more than {_LARGEST_ARCHIVE} bytes")
