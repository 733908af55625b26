"""CIFAR-10 as its authors publish it and torchvision unpacks it: Python pickles of arrays.

Nothing of a pickle is run, and numpy is handed bytes and nothing else.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import numpy as np

from spectrain_ext.checkpoint.pickles import Call, read_pickle
from spectrain_ext.files import read_bounded

from .cifar_arrays import SIDE, Arrays
from .tar import tar_files

FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_VALUES = 3 * SIDE * SIDE
_LARGEST = 1 << 26  # bytes of a batch; the originals have 31 million

_Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def read_folder(folder: Path) -> Arrays:
    """Read the six batches in ``folder``.

    Raises:
        FileNotFoundError: a batch is missing.
        ValueError: a batch is no pickle of images and labels alone, or has more than 64 MiB.
    """
    batches = {}
    for name in _TRAIN + _TEST:
        try:
            content = read_bounded(folder / name, _LARGEST)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{folder}: {name} is missing; expected {', '.join(_TRAIN + _TEST)}, pickled "
                "batches as torchvision's CIFAR10 unpacks them"
            ) from None
        batches[name] = _batch(f"{folder}: {name}", content)
    return _joined(batches)


def read_tar(path: Path) -> Arrays:
    """Read the six batches out of the archive, which is not unpacked.

    Raises:
        FileNotFoundError: a batch is missing.
        ValueError: it is no tar file, or a batch is no pickle of images and labels alone, or has
            more than 64 MiB.
    """
    members = {f"{FOLDER}/{name}": name for name in _TRAIN + _TEST}
    batches = {}
    for member, content in tar_files(
        path, lambda name: str(PurePosixPath(name)) in members, largest=_LARGEST
    ):
        name = members[str(PurePosixPath(member))]
        batches[name] = _batch(f"{path}: {name}", content)
    for name in _TRAIN + _TEST:
        if name not in batches:
            raise FileNotFoundError(f"{path}: {FOLDER}/{name} is missing in it")
    return _joined(batches)


def _joined(batches: Mapping[str, _Batch]) -> Arrays:
    return Arrays(
        *(
            np.concatenate([batches[name][side] for name in names])
            for names in (_TRAIN, _TEST)
            for side in (0, 1)
        )
    )


def _batch(where: str, content: bytes) -> _Batch:
    try:
        read = read_pickle(content)
    except ValueError as error:
        raise ValueError(f"{where}: expected a pickled batch of CIFAR-10, but {error}") from error
    batch = read if isinstance(read, dict) else {}
    # the originals were written by Python 2, whose strings are bytes
    images, labels = (batch.get(key.encode(), batch.get(key)) for key in ("data", "labels"))
    pixels = _pixels(images)
    if pixels is None or len(pixels) % _VALUES:
        raise ValueError(f"{where}: expected 'data', uint8 of shape (samples, {_VALUES})")
    count = len(pixels) // _VALUES
    if not (
        isinstance(labels, list)
        and len(labels) == count
        and all(type(label) is int and 0 <= label < 256 for label in labels)
    ):
        raise ValueError(f"{where}: expected 'labels', a list of {count} numbers below 256")
    values = np.frombuffer(pixels, np.uint8).reshape(count, 3, SIDE, SIDE)
    return values, np.array(labels, dtype=np.int64)


def _pixels(array: object) -> bytes | None:
    """The bytes of a pickled array of uint8 ``(samples, 3072)``; None: it is something else."""
    if not _calls(array, "_reconstruct", "numpy.core.multiarray", "numpy._core.multiarray"):
        return None
    state = array.state
    if not (isinstance(state, tuple) and len(state) == 5):
        return None
    _, shape, dtype, by_columns, content = state
    plain = (
        _calls(dtype, "dtype", "numpy")
        and dtype.arguments[:1] in (("u1",), (b"u1",))
        and by_columns is False
        and isinstance(content, bytes)
        and isinstance(shape, tuple)
        and len(shape) == 2
        and shape == (len(content) // _VALUES, _VALUES)
    )
    return content if plain else None


def _calls(value: Any, name: str, *modules: str) -> TypeGuard[Call]:
    return isinstance(value, Call) and value.name in {f"{module}.{name}" for module in modules}
