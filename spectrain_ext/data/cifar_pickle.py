"""CIFAR-10 as its authors publish it and torchvision unpacks it: Python pickles of arrays.

A pickle can run any code, so these are read by an unpickler that knows arrays and nothing else.
"""

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spectrain_ext.data.cifar_arrays import SIDE, Arrays

FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)


def read_folder(folder: Path) -> Arrays:
    """Read the six batches in ``folder``.

    Raises:
        FileNotFoundError: a batch is missing.
        ValueError: a batch is no pickle of images and labels alone.
    """

    def read(name: str) -> bytes:
        try:
            return (folder / name).read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{folder}: {name} is missing; expected {', '.join(_TRAIN + _TEST)}, pickled "
                "batches as torchvision's CIFAR10 unpacks them"
            ) from None

    return _read(str(folder), read)


def read_tar(path: Path) -> Arrays:
    """Read the six batches out of the archive, which is not unpacked.

    Raises:
        FileNotFoundError: a batch is missing.
        ValueError: it is no tar file, or a batch is no pickle of images and labels alone.
    """
    try:
        with tarfile.open(path) as archive:

            def read(name: str) -> bytes:
                try:
                    file = archive.extractfile(f"{FOLDER}/{name}")
                except KeyError:
                    file = None
                if file is None:
                    raise FileNotFoundError(f"{path}: {FOLDER}/{name} is missing in it")
                return file.read()

            return _read(str(path), read)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path}: expected a whole tar file, but {error}") from error


def _read(where: str, read: Callable[[str], bytes]) -> Arrays:
    parts = []
    for names in (_TRAIN, _TEST):
        batches = [_batch(f"{where}: {name}", read(name)) for name in names]
        parts += [np.concatenate([batch[side] for batch in batches]) for side in (0, 1)]
    return Arrays(*parts)


def _batch(where: str, content: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    try:
        # the originals were written by Python 2, whose strings are bytes
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # whatever a broken pickle raises
        raise ValueError(
            f"{where}: expected a pickled batch of CIFAR-10, but {type(error).__name__}: {error}"
        ) from error
    batch = batch if isinstance(batch, dict) else {}
    batch = {key.decode() if isinstance(key, bytes) else key: batch[key] for key in batch}
    images, labels = batch.get("data"), batch.get("labels")
    values = 3 * SIDE * SIDE
    if not (
        isinstance(images, np.ndarray)
        and images.dtype == np.uint8
        and images.shape == (len(images), values)
    ):
        raise ValueError(f"{where}: expected 'data', uint8 of shape (samples, {values})")
    if not (
        isinstance(labels, list)
        and len(labels) == len(images)
        and all(isinstance(label, int) for label in labels)
    ):
        raise ValueError(f"{where}: expected 'labels', a list of {len(images)} numbers")
    return images.reshape(-1, 3, SIDE, SIDE), np.array(labels, dtype=np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Finds what a pickled array needs; anything else is an error."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for every name in the pickle before it is used."""
        make_array = np.empty(0, np.uint8).__reduce__()[0]
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): make_array,
            ("numpy._core.multiarray", "_reconstruct"): make_array,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encode,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return allowed[module, name]


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes the bytes of an array."""
    return text.encode(encoding)
