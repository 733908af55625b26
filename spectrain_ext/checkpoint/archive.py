"""One tensor out of the archive that ``torch.save`` made of it, read as data."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Sequence

import torch
from torch import Tensor

from .pickles import Call, Elsewhere, Name, read_pickle

_LOCAL_HEADER = 30  # bytes, of zip, the last ones the lengths of name and more, which follow


def read_tensor(content: bytearray, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the plain tensor in an archive, on the CPU.

    The index in the archive is a pickle, which ``torch.load`` would run, limited to what torch
    holds to be harmless. Here it is not run; what it describes has to be a tensor of ``shape``
    within the bytes that are there.

    Raises:
        Exception: anything else; zipfile has many ways to say so.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if bytes(_record(content, found["byteorder"])).decode("ascii") != sys.byteorder:
        raise ValueError(f"expected the byte order {sys.byteorder}")
    read = read_pickle(bytes(_record(content, found["data.pkl"])))
    size, stride, offset, key = _layout(read, dtype)
    elements = _record(content, found[f"data/{key}"])
    if size != tuple(shape) or len(stride) != len(size):
        raise ValueError(f"expected the shape {list(shape)}")
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *stride)) < 0 or (last + 1) * dtype.itemsize > len(elements):
        raise ValueError("its elements are not all there")
    count = len(elements) // dtype.itemsize
    storage = torch.frombuffer(elements, dtype=dtype, count=count)
    return storage.as_strided(size, stride, offset).clone()  # with the order of its strides


def _record(content: bytearray, info: zipfile.ZipInfo) -> memoryview:
    """A file of the archive, whose check sum torch may have been told to leave out."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    header = info.header_offset
    name, more = struct.unpack_from("<HH", content, header + _LOCAL_HEADER - 4)
    start = header + _LOCAL_HEADER + name + more
    record = memoryview(content)[start : start + info.file_size]
    if header < 0 or len(record) != info.file_size:
        raise ValueError("it is cut short")
    return record


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
