"""Imitates arrays of frameworks that are not installed, by handmade DLPack capsules."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from torch import Tensor

CPU, CUDA = 1, 2
_FLOAT = 2
_pythonapi = ctypes.pythonapi
_pythonapi.PyCapsule_New.restype = ctypes.py_object
_pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pythonapi.PyCapsule_GetName.restype = ctypes.c_char_p
_pythonapi.PyCapsule_GetName.argtypes = [ctypes.py_object]
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class Producer:
    """An array accessible only by ``__dlpack__``; it counts capsules lent and returned.

    Args:
        array: the memory; on "CUDA", which nothing may access.
        versioned: whether it supports ``max_version``, and with it read-only memory.
        strides: False omits strides, as contiguous arrays may before DLPack 1.2.
    """

    def __init__(
        self,
        array: np.ndarray,
        *,
        device: int = CPU,
        versioned: bool = True,
        read_only: bool = False,
        strides: bool = True,
        byte_offset: int = 0,
        major: int = 1,
        deleter: bool = True,
    ) -> None:
        self.array, self.device = array, (device, 0)
        self._versioned, self._read_only, self._major = versioned, read_only, major
        self._strides, self._byte_offset, self._deleter = strides, byte_offset, deleter
        self.lent: list[Any] = []
        self.returned = 0
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        if not self._versioned and "max_version" in arguments:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.asked.append(arguments)
        a = self.array
        sizes = (ctypes.c_int64 * a.ndim)(*a.shape)
        steps = (ctypes.c_int64 * a.ndim)(*(s // a.itemsize for s in a.strides))
        pointer = ctypes.POINTER(ctypes.c_int64)
        strides = ctypes.cast(steps, pointer) if self._strides else None
        at, bits = a.ctypes.data - self._byte_offset, 8 * a.itemsize
        shape = ctypes.cast(sizes, pointer)
        tensor = _Tensor(
            at, *self.device, a.ndim, _FLOAT, bits, 1, shape, strides, self._byte_offset
        )
        deleter = _DELETER(self._take_back) if self._deleter else _DELETER()
        managed: Any = _Managed(tensor, None, deleter)
        if self._versioned:
            flags = int(self._read_only)
            managed = _ManagedVersioned(self._major, 0, None, deleter, flags, tensor)
        name = b"dltensor_versioned" if self._versioned else b"dltensor"
        capsule = _pythonapi.PyCapsule_New(ctypes.addressof(managed), name, None)
        self.lent.append((capsule, managed, sizes, steps, deleter))
        return capsule

    def _take_back(self, _: int) -> None:
        self.returned += 1

    @property
    def names(self) -> list[str]:
        """The current names of the capsules; "used_..." once consumed."""
        return [_pythonapi.PyCapsule_GetName(lent[0]).decode() for lent in self.lent]


class Refuses:
    """An array that refuses to be exported."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __dlpack__(self, **_: Any) -> Any:
        raise self._error


class Hidden:
    """A tensor whose owner supports only DLPack."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()
