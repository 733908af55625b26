"""Reads CIFAR-10 from its authors' pickles of arrays or from a tar file of JPEG images.

Torchvision leaves the same pickles. Nothing in a pickle is executed, and numpy receives only bytes.
JPEG files are ``train/<class>/<name>.jpg`` and ``test/<class>/<name>.jpg``. Archives are not
unpacked: links, devices and directories are skipped, and names are only compared.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import pickletools
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from spectrain_ext.extras import require
from spectrain_ext.files import read_bounded
from studies import REMEDY

CLASSES = 10
SIDE = 32
FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_VALUES = 3 * SIDE * SIDE
_LARGEST_BATCH = 1 << 26  # bytes of a batch; the originals have 31 million
_LONGEST = 200_000  # instructions of a batch; the originals have about 60,000
_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")
_STRINGS = (
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)

_SUFFIXES = (".jpg", ".jpeg")
_LARGEST_IMAGE = 1 << 20  # bytes of an image; 32x32 pixels need about a thousand
_MOST_IMAGES = 100_000  # images; CIFAR-10 has 60,000

_Array = np.ndarray[Any, Any]
_Batch = tuple[_Array, _Array]


@dataclass(frozen=True)
class Arrays:
    """Images uint8 ``(n, 3, 32, 32)`` and labels int64 below 10; ``lossy``: not the originals."""

    NAMES: ClassVar = ("train_images", "train_labels", "test_images", "test_labels")

    train_images: _Array
    train_labels: _Array
    test_images: _Array
    test_labels: _Array
    lossy: bool = False  # decoded from JPEG

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            labels = getattr(self, f"{part}_labels")
            if not len(labels) or labels.min() < 0 or labels.max() >= CLASSES:
                raise ValueError(f"{part} labels: expected some, all from 0 to {CLASSES - 1}")

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in self.NAMES:
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()


# Pickled batches


def read_batches(source: Path) -> Arrays:
    """Read the six batches in a folder, or in the archive without unpacking it."""
    names = _TRAIN + _TEST
    found: dict[str, bytes] = {}
    if source.is_dir():
        for name in names:
            try:
                found[name] = read_bounded(source / name, _LARGEST_BATCH)
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"{source}: {name} is missing; expected {', '.join(names)}, pickled batches as "
                    "torchvision's CIFAR10 unpacks them"
                ) from None
    else:
        members = {f"{FOLDER}/{name}": name for name in names}
        for member, content in tar_files(
            source, lambda name: str(PurePosixPath(name)) in members, largest=_LARGEST_BATCH
        ):
            found[members[str(PurePosixPath(member))]] = content
        for name in names:
            if name not in found:
                raise FileNotFoundError(f"{source}: {FOLDER}/{name} is missing in it")
    batches = {name: _batch(f"{source}: {name}", content) for name, content in found.items()}
    return Arrays(
        *(
            np.concatenate([batches[name][side] for name in part])
            for part in (_TRAIN, _TEST)
            for side in (0, 1)
        )
    )


def _batch(where: str, content: bytes) -> _Batch:
    try:
        pixels, labels = _fields(content)
    except (ValueError, OverflowError, struct.error) as error:
        raise ValueError(f"{where}: expected a pickled batch of CIFAR-10, but {error}") from error
    if pixels is None:
        raise ValueError(f"{where}: expected 'data', uint8 of shape (samples, {_VALUES})")
    count = len(pixels) // _VALUES
    if len(labels) != count or not all(0 <= label < 256 for label in labels):
        raise ValueError(f"{where}: expected 'labels', a list of {count} numbers below 256")
    values = np.frombuffer(pixels, np.uint8).reshape(count, 3, SIDE, SIDE)
    return values, np.array(labels, dtype=np.int64)


def _fields(content: bytes) -> tuple[bytes | None, list[int]]:
    """Return the bytes of a batch's images, None if they are anything else, and its labels.

    A pickle is a program, and even with numpy's own constructors alone it can make pointers of its
    bytes. Here nothing is run: the instructions are only listed, and in that list a key is followed
    by the constants of its value. Those of an array are its shape, its dtype, whether it is stored
    by columns, and its bytes.
    """
    pixels, labels, key = None, list[int](), b""
    numbers: list[int] = []
    dtype, by_rows = False, False
    argument: Any
    for n, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if n == _LONGEST:
            raise ValueError(f"it has more than {_LONGEST} instructions")
        if operation.name in ("NEWTRUE", "NEWFALSE"):
            by_rows = operation.name == "NEWFALSE"
        elif operation.name in _INTEGERS:
            (labels if key == b"labels" else numbers).append(argument)
        elif operation.name in _STRINGS and argument != "latin1":  # protocol 2's name for bytes
            # Python 2 wrote the originals; its strings are bytes
            text = argument.encode("latin-1") if isinstance(argument, str) else argument
            if key != b"data" or text == b"labels":
                key = text if text in (b"data", b"labels") else b""
                dtype = False
            elif text == b"u1":
                dtype = True
            elif dtype and by_rows and _is_whole(len(text), numbers):
                pixels, key = text, b""
    return pixels, labels


def _is_whole(size: int, numbers: list[int]) -> bool:
    samples, rest = divmod(size, _VALUES)
    return rest == 0 and (samples, _VALUES) in pairwise(numbers)


# JPEG files


def read_images(path: Path) -> Arrays:
    """Decode all images, in half a minute; classes are numbered in alphabetical order."""
    require("PIL.Image", "images in JPEG files need Pillow", REMEDY)
    found: dict[str, dict[str, dict[str, _Array]]] = {"train": {}, "test": {}}
    for count, (member, content) in enumerate(
        tar_files(path, lambda name: _place(name) is not None, largest=_LARGEST_IMAGE), 1
    ):
        if count > _MOST_IMAGES:
            raise ValueError(f"{path}: expected at most {_MOST_IMAGES} images, got more")
        part, kind, name = _place(member) or ("", "", "")
        found[part].setdefault(kind, {})[name] = _decode(f"{path}: {member!r}", content)
    for part, classes in found.items():
        if not classes:
            raise FileNotFoundError(
                f"{path}: there is no {part}/<class>/<name>.jpg in it; expected a tar file of "
                "train/<class>/<name>.jpg and test/<class>/<name>.jpg"
            )
    names = sorted(found["train"])
    if len(names) != CLASSES or sorted(found["test"]) != names:
        raise ValueError(
            f"{path}: expected the same {CLASSES} classes in train/ and test/, got "
            f"{_listed(names)} and {_listed(sorted(found['test']))}"
        )
    return Arrays(*_in_order(found["train"]), *_in_order(found["test"]), lossy=True)


def _place(name: str) -> tuple[str, str, str] | None:
    """Return part, class and file name of a member, None if it is not an image of either part."""
    path = PurePosixPath(name)
    if path.suffix.lower() not in _SUFFIXES or len(path.parts) < 3:
        return None
    part, kind, file = path.parts[-3:]
    return (part, kind, file) if part in ("train", "test") else None


def _listed(names: list[str]) -> str:
    more = ", ..." if len(names) > CLASSES + 1 else ""
    return ", ".join(map(repr, names[: CLASSES + 1])) + more


def _decode(where: str, content: bytes) -> _Array:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            size = image.size  # from the header, before decoding
            if size == (SIDE, SIDE):
                pixels = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
                # The memory layout of a cached array: convolutions round differently with channels
                # last, and the same command would give other figures from its second run on.
                whole: _Array = np.ascontiguousarray(pixels)
                return whole
    except Exception as error:  # any error of Pillow from a damaged or huge image
        raise ValueError(f"{where}: expected a JPEG file, but {error}") from error
    raise ValueError(f"{where}: expected {SIDE}x{SIDE} pixels, got {size}")


def _in_order(classes: dict[str, dict[str, _Array]]) -> _Batch:
    """Return images and labels by class and name, independent of the order in the file."""
    images = [classes[name][file] for name in sorted(classes) for file in sorted(classes[name])]
    counts = [len(classes[name]) for name in sorted(classes)]
    return np.stack(images), np.repeat(np.arange(len(counts), dtype=np.int64), counts)


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
        *(tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OverflowError, OSError),
        MemoryError,  # asked for by a header, whatever follows
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
