"""Tests foreign tar archives: only plain files are read, within bounds."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import tracemalloc

import pytest

from studies.data import cifar_files
from studies.data.cifar_files import tar_files
from studies.data.sources import load_cifar10, load_text


def archive(path, members, mode="w", **how):
    """Write (name, content or type) pairs."""
    with tarfile.open(path, mode, **how) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes) and len(content) != 1:
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
            else:
                member.type, member.linkname = content, name
                file.addfile(member)
    return path


def read(path, largest=10**6):
    return list(tar_files(path, lambda name: not name.startswith("other"), largest=largest))


LONG = "d" * 90 + "/" + "é" * 90 + "/" + "f" * 90 + ".jpg"
FILES = [("a.txt", b"hello"), ("empty", b""), ("other", b"x" * 10**6), (LONG, b"y" * 1024)]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_plain_files_are_read(tmp_path, mode, form):
    path = archive(tmp_path / "a", FILES, mode, format=form)
    assert read(path) == [FILES[0], FILES[1], FILES[3]]


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6"])
def test_links_devices_and_folders_are_passed_over(tmp_path, kind):
    path = archive(tmp_path / "a", [("a", kind), ("b", b"content"), ("/etc/../c", b"more")])
    assert read(path) == [("b", b"content"), ("/etc/../c", b"more")]
    assert os.listdir(tmp_path) == ["a"]


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path):
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
def test_decompression_stops_at_the_limit_and_takes_no_memory(tmp_path, monkeypatch, pack):
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
def test_every_cut_is_noticed(tmp_path, mode):
    content = archive(tmp_path / "a", FILES[:2], mode).read_bytes()
    for size in range(0, len(content) - (10240 - 2048 if mode == "w" else 0), 37):
        (tmp_path / "b").write_bytes(content[:size])
        with pytest.raises(ValueError, match="b: expected a whole tar file"):
            read(tmp_path / "b")


def test_a_changed_header_is_noticed(tmp_path):
    path = archive(tmp_path / "a", FILES[:2])
    content = path.read_bytes()
    for at in (0, 100, 130, 150, 156, 400, 1024):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match="a: expected a whole tar file, but"):
            read(path)


def test_a_missing_archive_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        read(tmp_path)


# Around the archive


def jpegs(path, content, count=1):
    return archive(path, [(f"train/cat/{k}.jpg", content) for k in range(count)])


def test_an_image_of_many_pixels_is_not_decoded(tmp_path):
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("L", (16, 16)).save(buffer, "JPEG")
    content = bytearray(buffer.getvalue())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = b"\xff\xff\xff\xff"  # 65,535 x 65,535: Pillow's own limit
    jpegs(tmp_path / "cifar.tar", bytes(content))
    with pytest.raises(ValueError, match=r"0\.jpg': expected a JPEG file, but Image size"):
        load_cifar10(tmp_path)
    content[at : at + 4] = b"\x1f\xff\x1f\xff"
    jpegs(tmp_path / "cifar.tar", bytes(content))
    with pytest.raises(ValueError, match=r"0\.jpg': expected 32x32 pixels, got \(8191, 8191\)"):
        load_cifar10(tmp_path)


def test_more_images_than_the_data_set_has(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(cifar_files, "_MOST_IMAGES", 3)
    buffer = io.BytesIO()
    image.new("RGB", (32, 32)).save(buffer, "JPEG")
    jpegs(tmp_path / "cifar.tar", buffer.getvalue(), 4)
    with pytest.raises(ValueError, match="expected at most 3 images"):
        load_cifar10(tmp_path)


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    os.mkfifo(folder / "data_batch_1")
    with pytest.raises(ValueError, match="data_batch_1: expected a plain file"):
        load_cifar10(folder)
    (folder / "data_batch_1").unlink()
    (folder / "data_batch_1").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="data_batch_1: expected a plain file"):
        load_cifar10(folder)
    (tmp_path / "a.txt").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"a\.txt: expected a plain file"):
        load_text(tmp_path, context=4)


def test_files_that_are_too_large(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "a.txt"):
        (folder / name).touch()
        os.truncate(folder / name, 2**40)
    with pytest.raises(ValueError, match="data_batch_1: expected at most 67108864 bytes"):
        load_cifar10(folder)
    with pytest.raises(ValueError, match=r"a\.txt: expected at most 268435456 bytes"):
        load_text(folder, context=4)
