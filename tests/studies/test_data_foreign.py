"""Tests data files of strangers: nothing in them is executed, and memory is bounded."""

from __future__ import annotations

import ast
import bz2
import gzip
import lzma
import os
import pickle
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.study_data import FOLDER, archive, batch, jpeg

import spectrain_ext
import studies
from studies.data import cifar_files
from studies.data.cifar_files import _batch, tar_files
from studies.data.sources import load_cifar10, load_text

# Pickles


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("key", [str, str.encode], ids=["str", "bytes"])
@pytest.mark.parametrize("samples", [1, 2, 300])
@pytest.mark.parametrize("names", [("data", "labels"), ("labels", "data")])
def test_what_pickle_wrote(
    protocol: int, key: Callable[[str], Any], samples: int, names: tuple[str, str]
) -> None:
    fields = batch(samples, 0)
    written = {key("batch_label"): key("training batch"), key("num_vis"): 3072}
    written |= {key(name): fields[name.encode()] for name in names}
    written |= {key("filenames"): [key(f"{n}.png") for n in range(samples)]}
    pixels, labels = _batch("here", pickle.dumps(written, protocol))
    assert np.array_equal(pixels.reshape(samples, -1), fields[b"data"])
    assert labels.tolist() == fields[b"labels"]


def pointers() -> bytes:
    """Return an array whose bytes numpy takes for pointers, with only numpy's own names."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    # the dtype's flags, without the one for a list of objects
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R"
    dtype += b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3dtb"
    state = b"(K\x01K\x03\x85" + dtype + b"\x89C\x18" + b"A" * 24 + b"tb"
    return b"\x80\x03}(X\x04\x00\x00\x00data" + array + state + b"X\x06\x00\x00\x00labels](K\x01eu."


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04]",
        b"\x80\x04\xff.",
        b"\x80\x04" + b"I" + b"9" * 10**6 + b"\n.",  # slow to read
        b"\x80\x04\x8d" + b"\xff" * 8 + b"x.",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fx.",
        b"\x80\x04T\xff\xff\xff\x7fx.",
        b"\x80\x04\x8b\xff\xff\xff\x7fx.",
        pointers(),
        b"\x80\x04" + b"]" * 10**6,
        b"\x80\x04" + b"(" * 10**6,
        b"\x80\x04j\xff\xff\xff\x7f.",  # a memo of that size
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x04)" + b"\x85" * 10**6 + b".",  # a tuple in a tuple in a tuple
        b"\x80\x04}" + b")" + b"\x85" * 10**5 + b"K\x01s.",  # and as a key
        b"\x80\x02c_codecs\nencode\nq\x00X\x00\x00\x10\x00" + b"x" * 2**20  # one text, many times
        + b"q\x01X\x06\x00\x00\x00latin1q\x02" + b"h\x00h\x01h\x02\x86R" * 10**4 + b".",
    ],
    ids=range(16),
)  # fmt: skip
def test_anything_else_is_a_value_error_in_bounded_memory_and_stack(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^here: expected "):
            _batch("here", content)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="here: expected 'data', uint8"):
        _batch("here", pickle.dumps(Runs(tmp_path / "made"), protocol=2))
    assert not (tmp_path / "made").exists()


NEVER = ("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle")
NEVER += ("joblib", "yaml", "jsonpickle", "runpy")


def found_in(path: Path) -> set[str]:
    """Return imports and calls of a module that could execute a file's content."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.split(".")[0] in NEVER}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] in NEVER:
                found.add(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            flags = ", ".join(
                f"{k.arg}={ast.unparse(k.value)}"
                for k in node.keywords
                if k.arg in ("allow_pickle", "weights_only")
            )
            last = name.rpartition(".")[2]
            if name in ("eval", "exec", "compile", "__import__") or (
                last in ("load", "fromfile", "memmap", "genfromtxt", "loadtxt")
                and name.split(".")[0] in ("torch", "np", "numpy")
            ):
                found.add(f"{name}({flags})")
    return found


def test_no_file_is_run() -> None:
    folders = [Path(spectrain_ext.__file__).parent, Path(studies.__file__).parent]
    found = {
        (path.relative_to(folder.parent).as_posix(), what)
        for folder in folders
        for path in folder.rglob("*.py")
        for what in found_in(path)
    }
    # the package's own arrays, of only numbers
    assert found == {("studies/data/sources.py", "np.load(allow_pickle=False)")}


# Tars


def read(path: Path, largest: int = 10**6) -> list[tuple[str, bytes]]:
    return list(tar_files(path, lambda name: not name.startswith("other"), largest=largest))


LONG = "d" * 90 + "/" + "é" * 90 + "/" + "f" * 90 + ".jpg"
FILES = [("a.txt", b"hello"), ("empty", b""), ("other", b"x" * 10**6), (LONG, b"y" * 1024)]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_plain_files_are_read(tmp_path: Path, mode: str, form: int) -> None:
    path = archive(tmp_path / "a", FILES, mode, format=form)
    assert read(path) == [FILES[0], FILES[1], FILES[3]]


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6"])
def test_links_devices_and_folders_are_passed_over(tmp_path: Path, kind: bytes) -> None:
    path = archive(tmp_path / "a", [("a", kind), ("b", b"content"), ("/etc/../c", b"more")])
    assert read(path) == [("b", b"content"), ("/etc/../c", b"more")]
    assert os.listdir(tmp_path) == ["a"]


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "a", [("b", b"x" * 2000)])
    with pytest.raises(ValueError, match="a: expected a whole tar file, but 'b' has 2000 bytes"):
        read(path, 1999)
    # a header that promises more than the file has
    header = tarfile.TarInfo("b")
    header.size = 10**15
    for member in (header.tobuf(), header.tobuf(tarfile.GNU_FORMAT)):
        path.write_bytes(member)
        with pytest.raises(ValueError, match=r"a: expected a whole tar file, but"):
            read(path)


@pytest.mark.parametrize(
    "pack",
    [
        *(gzip.compress, bz2.compress, lzma.compress),
        pytest.param(bytes, marks=pytest.mark.nightly),  # no decompression, and 10 s of tracemalloc
    ],
)
def test_decompression_stops_at_the_limit_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(cifar_files, "_LARGEST_ARCHIVE", 10**7)
    header = tarfile.TarInfo("other")
    header.size = 2 * 10**7
    (tmp_path / "a").write_bytes(pack(header.tobuf() + bytes(2 * 10**7)))
    (tmp_path / "b").write_bytes(pack(bytes(2 * 10**7)))  # after its end
    tracemalloc.start()
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=f"{name}: .* more than 10000000 bytes"):
            read(tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_every_cut_and_every_changed_header_is_noticed(tmp_path: Path, mode: str) -> None:
    content = archive(tmp_path / "a", FILES[:2], mode).read_bytes()
    damaged = [
        content[:size] for size in range(0, len(content) - (10240 - 2048 if mode == "w" else 0), 37)
    ]
    if mode == "w":
        for at in (0, 100, 130, 150, 156, 400, 1024):
            damaged.append(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    for each in damaged:
        (tmp_path / "b").write_bytes(each)
        with pytest.raises(ValueError, match="b: expected a whole tar file"):
            read(tmp_path / "b")


def test_an_image_of_many_pixels_is_not_decoded(tmp_path: Path) -> None:
    content = bytearray(jpeg(16))
    at = content.index(b"\xff\xc0") + 5
    # 65,535 x 65,535 is beyond Pillow's own limit
    for size, said in (
        (b"\xff\xff\xff\xff", "expected a JPEG file, but Image size"),
        (b"\x1f\xff\x1f\xff", r"expected 32x32 pixels, got \(8191, 8191\)"),
    ):
        content[at : at + 4] = size
        archive(tmp_path / "cifar.tar", [("train/cat/0.jpg", bytes(content))])
        with pytest.raises(ValueError, match=rf"0\.jpg': {said}"):
            load_cifar10(tmp_path)


def test_more_images_than_the_data_set_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar_files, "_MOST_IMAGES", 3)
    archive(tmp_path / "cifar.tar", [(f"train/cat/{k}.jpg", jpeg()) for k in range(4)])
    with pytest.raises(ValueError, match="expected at most 3 images"):
        load_cifar10(tmp_path)


# Files that are no files


def test_a_pipe_a_device_or_a_huge_file_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()

    def huge(path: Path) -> None:
        path.touch()
        os.truncate(path, 2**40)

    for make, said, most in (
        (os.mkfifo, "expected a plain file", ("", "")),
        (lambda path: path.symlink_to("/dev/zero"), "expected a plain file", ("", "")),
        (huge, "expected at most", (" 67108864 bytes", " 268435456 bytes")),
    ):
        for name, limit in zip(("data_batch_1", "a.txt"), most, strict=True):
            (folder / name).unlink(missing_ok=True)
            make(folder / name)
            with pytest.raises(ValueError, match=f"{name}: {said}{limit}"):
                load_text(folder, context=4) if name == "a.txt" else load_cifar10(folder)


def test_a_missing_archive_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
