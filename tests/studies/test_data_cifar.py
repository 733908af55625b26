"""Tests CIFAR-10 from files of strangers: read whole, nothing executed, in bounded memory."""

import ast
import gzip
import os
import pickle
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.study_data import FOLDER, TRAIN, archive, images, jpeg, write_batches

import spectrain_ext
import studies
from studies.data import cifar_files
from studies.data.cifar_files import tar_files
from studies.data.sources import load_cifar10
from studies.data.split import Batches, augment, normalize


def stored(pairs: Any) -> list[tuple[bytes, int]]:
    """Return images and labels in an order of their own."""
    return sorted((np.asarray(image).tobytes(), int(label)) for image, label in pairs)


# Pickled batches


@pytest.mark.parametrize("form", ["folder-above", "folder-itself", "archive", "str-keys"])
def test_pickled_batches_are_read_whole_in_a_fixed_order_that_mixes_them(
    tmp_path: Path, form: str
) -> None:
    batches = write_batches(tmp_path)
    folder = tmp_path / FOLDER
    plain = load_cifar10(folder)
    path = tmp_path if form == "folder-above" else folder
    if form == "archive":
        path = tmp_path / "packed"
        path.mkdir()
        with tarfile.open(path / "cifar-10-python.tar.gz", "w:gz") as packed:
            packed.add(folder, FOLDER)
    elif form == "str-keys":
        for name, each in batches.items():
            text = {"num_vis": 3072, **{key.decode(): value for key, value in each.items()}}
            (folder / name).write_bytes(pickle.dumps(text, protocol=4))
    data = load_cifar10(path)
    assert (data.name, data.kind, data.classes) == ("CIFAR-10", "images", 10)
    assert data.train_inputs.shape == (35, 3, 32, 32)
    train, test = [batches[name] for name in TRAIN], [batches["test_batch"]]
    for inputs, targets, each in (
        (data.train_inputs, data.train_targets, train),
        (data.test_inputs, data.test_targets, test),
    ):
        expected = [pair for b in each for pair in zip(b[b"data"], b[b"labels"], strict=True)]
        assert stored(zip(inputs, targets, strict=True)) == stored(expected)
    assert torch.equal(data.train_inputs, plain.train_inputs)
    assert data.fingerprint == plain.fingerprint
    assert data.train_targets.tolist() != [label for b in train for label in b[b"labels"]]


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"no pickle", "test_batch: .*expected a pickled batch"),
        (b"\x80\x04" + b"]" * 10**6, "expected a pickled batch"),
        (b"\x80\x04j\xff\xff\xff\x7f.", "'data', uint8"),  # a memo of that size
        (Runs(), "'data', uint8"),
        ({"data": np.zeros((2, 9), np.uint8)}, r"test_batch: .*shape \(samples, 3072\)"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "test_batch: .*a list of 2"),
        ({"data": np.zeros((2, 3072), "u1", "F"), "labels": [1, 2]}, "'data', uint8"),
        ({"data": np.zeros((2, 3072), "i1"), "labels": [1, 2]}, "test_batch: .*'data', uint8"),
        ({"data": np.zeros((1, 3072), "u1"), "labels": [10]}, "test labels: .*0 to 9"),
        (None, "test_batch is missing"),
    ],
    ids=range(10),
)
def test_a_broken_batch_is_named_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_batches(tmp_path)
    path = tmp_path / FOLDER / "test_batch"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    if content is None:
        path.unlink()
    tracemalloc.start()
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        load_cifar10(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert not Path("made").exists()


NEVER = ("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle")
NEVER += ("joblib", "yaml", "jsonpickle", "runpy")


def executing(path: Path) -> set[str]:
    """Return imports and calls of a module that could execute a file's content."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.split(".")[0] in NEVER}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {str(node.module)} & set(NEVER)
        elif isinstance(node, ast.Call):
            name, safe = ast.unparse(node.func), {"allow_pickle=False", "weights_only=True"}
            loads = name in ("torch.load", "np.load", "np.fromfile", "np.memmap", "np.genfromtxt")
            if name in ("eval", "exec", "compile", "__import__") or (
                loads and safe.isdisjoint(map(ast.unparse, node.keywords))
            ):
                found.add(name)
    return found


def test_no_file_is_run() -> None:
    for package in (spectrain_ext, studies):
        for path in Path(package.__file__).parent.rglob("*.py"):
            assert not executing(path), path


# Tars and JPEG files


def test_plain_files_of_a_tar_are_read_and_nothing_else(tmp_path: Path) -> None:
    long = "d" * 90 + "/" + "é" * 90 + "/" + "f" * 90 + ".jpg"
    files = [("a.txt", b"hello"), ("empty", b""), ("other", b"x" * 10**6), (long, b"y" * 1024)]
    links = [(f"link{kind}", b"%d" % kind) for kind in range(1, 7)]  # devices and folders as well
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = archive(tmp_path / "a", [*links, *files], "w:gz", format=form)
        found = list(tar_files(path, lambda name: not name.startswith("other"), largest=10**6))
        assert found == [files[0], files[1], files[3]]
        assert os.listdir(tmp_path) == ["a"]


def test_a_tar_that_is_too_large_cut_short_or_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar_files, "_LARGEST_ARCHIVE", 10**7)
    path = archive(tmp_path / "a", [("a.txt", b"hello"), ("b", b"x" * 2000)])
    with pytest.raises(ValueError, match="a: expected a whole tar file, but 'b' has 2000 bytes"):
        list(tar_files(path, lambda name: True, largest=1999))
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(0, len(whole) - 10240 + 4096, 400)]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 100, 150, 1024)]
    header = tarfile.TarInfo("b")
    header.size = 10**15  # more than the file has
    damaged += [header.tobuf(), gzip.compress(bytes(2 * 10**7)), gzip.compress(whole)[:-20]]
    for content in damaged:
        (tmp_path / "b").write_bytes(content)
        tracemalloc.start()
        with pytest.raises(ValueError, match="b: expected a whole tar file, but"):
            list(tar_files(tmp_path / "b", lambda name: True, largest=10**6))
        assert tracemalloc.get_traced_memory()[1] < 10**7
        tracemalloc.stop()


def test_jpeg_files_are_decoded_once_and_kept_under_the_hash_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "my-cifar.tar.xz", tmp_path / "cache"
    archive(path, images(), "w:xz")
    data = load_cifar10(tmp_path, cache=cache)
    assert data.name == "CIFAR-10 (JPEG)"
    assert data.train_inputs.shape == data.test_inputs.shape == (20, 3, 32, 32)
    assert data.train_targets.bincount().tolist() == [2] * 10
    red, green, blue = data.train_inputs.float().mean((2, 3)).unbind(1)
    # within JPEG's losses
    assert (red - 25 * data.train_targets).abs().max() <= 4
    assert (torch.minimum(green, (green - 100).abs())).max() <= 4
    assert blue.max() <= 4
    assert data.test_inputs[:, 2].min() >= 250
    (kept,) = cache.iterdir()
    assert data.fingerprint.startswith(kept.stem.removeprefix("cifar10-"))
    with monkeypatch.context() as patch:
        patch.setattr(cifar_files, "read_images", None)
        again = load_cifar10(path, cache=cache).train_inputs
    assert torch.equal(again, data.train_inputs)
    assert again.stride() == data.train_inputs.stride(), "a convolution would round otherwise"
    written = kept.read_bytes()
    kept.write_bytes(written[: len(written) // 2])  # as after an interruption
    assert torch.equal(load_cifar10(path, cache=cache).train_inputs, again)
    assert kept.read_bytes() == written


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (lambda: images(("train",)), "no test/<class>"),
        (lambda: images(size=31), r"train/classa/0\.jpg': expected 32x32 pixels"),
        (lambda: images(classes=9), r"same 10 classes .* got 'classa', 'classb'"),
        (lambda: [("train/cat/0.jpg", b"jpeg?")], r"cat/0\.jpg': expected a JPEG file"),
        (lambda: [(f"train/cat/{k}.jpg", jpeg()) for k in range(41)], "expected at most 40 images"),
        (None, "there is no CIFAR-10 in it; expected the folder cifar-10-batches-py"),
    ],
)
def test_other_images_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: Any, expected: str
) -> None:
    monkeypatch.setattr(cifar_files, "_MOST_IMAGES", 40)
    if members is not None:
        archive(tmp_path / "cifar.tar", members())
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        load_cifar10(tmp_path)


# Conversion to a model's input


def test_normalize_is_zero_mean_unit_variance_of_cifar() -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 32, 32)
    black, white = normalize(pixels)
    expected = [-0.4914 / 0.247, -0.4822 / 0.2435, -1.70680]
    assert black[:, 0, 0].tolist() == pytest.approx(expected, abs=1e-4)
    assert white[0, 3, 3].item() == pytest.approx((1 - 0.4914) / 0.247, abs=1e-4)


def test_augmented_images_are_shifted_and_mirrored_as_the_seed_says(tmp_path: Path) -> None:
    image = torch.arange(1, 3 * 64 + 1, dtype=torch.uint8).view(1, 3, 8, 8)
    padded = torch.nn.functional.pad(image[0], (4, 4, 4, 4))
    shifts = [padded[:, row : row + 8, col : col + 8] for row in range(9) for col in range(9)]
    possible = [shift.tolist() for shift in shifts] + [shift.flip(2).tolist() for shift in shifts]
    varied = augment(image.expand(400, 3, 8, 8), torch.Generator().manual_seed(0))
    assert len({possible.index(one.tolist()) for one in varied}) > 120  # of 162
    write_batches(tmp_path)
    data = load_cifar10(tmp_path)
    first, again, plain = (
        torch.cat([x for x, _ in Batches(data, batch_size=8, seed=0, augmented=augmented)])
        for augmented in (True, True, False)
    )
    assert torch.equal(first, again) and not torch.equal(first, plain)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain, normalize(data.train_inputs[order]))
