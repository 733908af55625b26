"""One tensor out of the archive that ``torch.save`` made of it, read as data."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Sequence
from typing import IO, Any, cast

import torch
from torch import Tensor

from .pickles import Call, Elsewhere, Name, read_pickle

_LOCAL_HEADER = 30  # bytes, of zip; then the name and more


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._at = 0
        self.length = length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("before its beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self.length - self._at))
        self._file.seek(self._start + self._at)
        found = self._file.readinto(memoryview(buffer)[:size])
        self._at += found
        return found


def read_tensor(
    file: io.BufferedReader, start: int, length: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the plain tensor in a part of a file, on the CPU.

    The index in the archive is a pickle, which ``torch.load`` would run, limited to what torch
    holds to be harmless. Here it is not run; what it describes has to be a tensor of ``shape``
    within the bytes that are there.

    Raises:
        Exception: anything else; zipfile has many ways to say so.
    """
    stream = _Slice(file, start, length)
    with zipfile.ZipFile(cast(IO[bytes], stream)) as archive:
        found = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if _record(stream, found["byteorder"]).decode("ascii") != sys.byteorder:
        raise ValueError(f"expected the byte order {sys.byteorder}")
    read = read_pickle(bytes(_record(stream, found["data.pkl"])))
    size, stride, offset, key = _layout(read, dtype)
    content = _record(stream, found[f"data/{key}"])
    if size != tuple(shape) or len(stride) != len(size):
        raise ValueError(f"expected the shape {list(shape)}")
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *stride)) < 0 or (last + 1) * dtype.itemsize > len(content):
        raise ValueError("its elements are not all there")
    count = len(content) // dtype.itemsize
    return torch.frombuffer(content, dtype=dtype, count=count).as_strided(size, stride, offset)


def _record(stream: _Slice, info: zipfile.ZipInfo) -> bytearray:
    """A file of the archive, whose check sum torch may have been told to leave out."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > stream.length:
        raise ValueError("it is compressed")
    stream.seek(info.header_offset)
    header = stream.read(_LOCAL_HEADER)
    name, more = struct.unpack_from("<HH", header.ljust(_LOCAL_HEADER, b"\0"), 26)
    stream.seek(info.header_offset + _LOCAL_HEADER + name + more)
    content = bytearray(info.file_size)
    if stream.readinto(content) != info.file_size:
        raise ValueError("it is cut short")
    return content


_Layout = tuple[tuple[int, ...], tuple[int, ...], int, str]


def _layout(found: object, dtype: torch.dtype) -> _Layout:
    """Size, stride, offset in elements, and which storage."""
    match found:
        case Call("torch._utils._rebuild_tensor_v2", (kept, offset, size, stride, _, _)):
            pass
        # of dtypes without a class of storages
        case Call("torch._utils._rebuild_tensor_v3", (kept, offset, size, stride, _, _, kind)) if (
            kind == Name(str(dtype))
        ):
            pass
        case _:
            raise ValueError("expected a plain tensor")
    if not isinstance(kept, Elsewhere):
        raise ValueError("expected a plain tensor")
    _, _, key, _, _ = kept.identifier
    numbers = (offset, *size, *stride)
    if not all(type(number) is int for number in numbers):
        raise ValueError("expected a plain tensor")
    return size, stride, offset, key
