"""Tests CIFAR-10 in each of its formats, from small files that the test writes."""

import io
import pickle
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.study_data import FOLDER, TRAIN, archive, batch, images, write_batches

from studies.data import cifar_files
from studies.data.sources import load_cifar10
from studies.data.split import Batches, augment, normalize


def python2_pickle(pixels: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """Imitate Python 2: strings for bytes, and numpy's old module names."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    rows, columns = (b"J" + struct.pack("<i", size) for size in pixels.shape)
    minus_one = b"J" + struct.pack("<i", -1)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + rows + columns + b"\x86cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03"
    )
    array += text(b"|") + b"NNN" + 2 * minus_one + b"K\x00tb\x89" + text(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def rows_of(inputs: torch.Tensor, targets: torch.Tensor) -> list[tuple[bytes, int]]:
    return sorted(
        (image.numpy().tobytes(), int(label)) for image, label in zip(inputs, targets, strict=True)
    )


def stored(batches: list[dict[bytes, Any]]) -> list[tuple[bytes, int]]:
    return sorted(
        (image.tobytes(), label)
        for each in batches
        for image, label in zip(each[b"data"], each[b"labels"], strict=True)
    )


# Pickled batches


@pytest.mark.parametrize("form", ["folder-above", "folder-itself", "archive", "python-2"])
def test_pickled_batches_are_read_whole_in_a_fixed_order_that_mixes_them(
    tmp_path: Path, form: str
) -> None:
    batches = write_batches(tmp_path)
    folder = path = tmp_path / FOLDER
    plain = load_cifar10(folder)
    if form == "archive":
        path = tmp_path / "packed"
        path.mkdir()
        with tarfile.open(path / "cifar-10-python.tar.gz", "w:gz") as packed:
            packed.add(folder, FOLDER)
    elif form == "folder-above":
        path = tmp_path
    elif form == "python-2":
        for name, each in batches.items():
            (folder / name).write_bytes(python2_pickle(each[b"data"], each[b"labels"]))
    data = load_cifar10(path)
    assert (data.name, data.kind, data.classes) == ("CIFAR-10", "images", 10)
    assert data.train_inputs.shape == (35, 3, 32, 32)
    assert data.train_inputs.dtype == torch.uint8
    train = [batches[name] for name in TRAIN]
    assert rows_of(data.train_inputs, data.train_targets) == stored(train)
    assert rows_of(data.test_inputs, data.test_targets) == stored([batches["test_batch"]])
    assert torch.equal(data.train_inputs, plain.train_inputs)
    assert data.fingerprint == plain.fingerprint
    assert data.train_targets.tolist() != [label for each in train for label in each[b"labels"]]


def test_other_content_has_another_fingerprint(tmp_path: Path) -> None:
    write_batches(tmp_path / "a", 7)
    write_batches(tmp_path / "b", 8)
    assert load_cifar10(tmp_path / "a").fingerprint != load_cifar10(tmp_path / "b").fingerprint


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"no pickle", "test_batch: .*expected a pickled batch"),
        (pickle.dumps(batch(2, 3), protocol=4)[:-40], "test_batch: .*expected a pickled batch"),
        ([1], "test_batch: .*expected 'data', uint8 of shape"),
        ({"data": np.zeros((2, 9), np.uint8)}, r"test_batch: .*shape \(samples, 3072\)"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "test_batch: .*a list of 2"),
        ({"data": np.zeros((2, 3072), "u1", "F"), "labels": [1, 2]}, "'data', uint8"),
        ({"data": np.zeros((2, 3072), "i1"), "labels": [1, 2]}, "test_batch: .*'data', uint8"),
        ({"data": np.zeros((1, 3072), "u1"), "labels": [2**70]}, "numbers below 256"),
        ({"data": np.zeros((1, 3072), "u1"), "labels": [10]}, "test labels: .*0 to 9"),
    ],
)
def test_a_broken_batch_is_named(tmp_path: Path, content: Any, expected: str) -> None:
    write_batches(tmp_path)
    written = content if isinstance(content, bytes) else pickle.dumps(content)
    (tmp_path / FOLDER / "test_batch").write_bytes(written)
    with pytest.raises(ValueError, match=expected):
        load_cifar10(tmp_path)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    write_batches(tmp_path)
    (tmp_path / FOLDER / "data_batch_4").unlink()
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / FOLDER, FOLDER)
    for path in (tmp_path, tmp_path / "cifar-10-python.tar.gz"):
        with pytest.raises(FileNotFoundError, match="data_batch_4 is missing"):
            load_cifar10(path)


# JPEG files


@pytest.mark.parametrize("suffix", ["", "gz", "bz2", "xz"])
def test_jpeg_files_are_decoded_from_any_tar(tmp_path: Path, suffix: str) -> None:
    archive(tmp_path / f"my-cifar.tar{suffix and '.'}{suffix}", images(), f"w:{suffix}")
    data = load_cifar10(tmp_path)
    assert data.name == "CIFAR-10 (JPEG)"
    assert data.train_inputs.shape == data.test_inputs.shape == (20, 3, 32, 32)
    assert data.train_targets.bincount().tolist() == [2] * 10
    red, green, blue = data.train_inputs.float().mean((2, 3)).unbind(1)
    # within JPEG's losses
    assert (red - 25 * data.train_targets).abs().max() <= 4
    assert (torch.minimum(green, (green - 100).abs())).max() <= 4
    assert blue.max() <= 4
    assert data.test_inputs[:, 2].min() >= 250


def test_decoded_images_are_kept_under_the_hash_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "cifar.tar", tmp_path / "cache"
    archive(path, images())
    before = load_cifar10(path, cache=cache)
    (kept,) = cache.iterdir()
    assert before.fingerprint.startswith(kept.stem.removeprefix("cifar10-"))
    written = kept.read_bytes()

    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} is read again")

    with monkeypatch.context() as patch:
        patch.setattr(cifar_files, "read_images", refuse)
        again = load_cifar10(path, cache=cache).train_inputs
        with pytest.raises(AssertionError, match="read again"):
            load_cifar10(path)
    assert torch.equal(again, before.train_inputs)
    assert again.stride() == before.train_inputs.stride(), "a convolution would round otherwise"
    assert sorted(child.name for child in tmp_path.iterdir()) == ["cache", path.name]
    packed = io.BytesIO()
    np.savez_compressed(packed, train_images=np.zeros(10**8, np.uint8))  # 100 kB
    # as after an interruption; a small file that would be a large array
    for damaged in (written[: len(written) // 2], packed.getvalue()):
        kept.write_bytes(damaged)
        assert torch.equal(load_cifar10(path, cache=cache).train_inputs, before.train_inputs)
        assert kept.read_bytes() == written
    archive(path, images(), "w:gz")
    load_cifar10(path, cache=cache)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("members", "error", "expected"),
    [
        (lambda: images(("train",)), FileNotFoundError, "no test/<class>"),
        (lambda: images(size=31), ValueError, r"train/classa/0\.jpg': expected 32x32 pixels"),
        (lambda: images(classes=9), ValueError, r"same 10 classes .* got 'classa', 'classb'"),
        (lambda: [("train/cat/0.jpg", b"jp?")], ValueError, r"cat/0\.jpg': expected a JPEG file"),
    ],
)
def test_other_images_are_named(
    tmp_path: Path, members: Any, error: type[Exception], expected: str
) -> None:
    pytest.importorskip("PIL.Image")
    archive(tmp_path / "cifar.tar", members())
    with pytest.raises(error, match=expected):
        load_cifar10(tmp_path)


def test_a_missing_pillow_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive(tmp_path / "cifar.tar", [])
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -r studies/requirements.txt"):
        load_cifar10(tmp_path)


def test_nothing_there_names_all_formats_and_two_tars_are_ambiguous(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError) as caught:
            load_cifar10(path)
        for part in (str(path), FOLDER, "cifar-10-python.tar.gz", "<class>"):
            assert part in str(caught.value)
    for name in ("cifar.tar", "CIFAR10.tar.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"found CIFAR10\.tar\.gz, cifar\.tar; name the file"):
        load_cifar10(tmp_path)


# Conversion to a model's input


def test_normalize_is_zero_mean_unit_variance_of_cifar() -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 32, 32)
    black, white = normalize(pixels)
    assert black[:, 0, 0].tolist() == pytest.approx(
        [-0.4914 / 0.247, -0.4822 / 0.2435, -1.70680], abs=1e-4
    )
    assert white[0, 3, 3].item() == pytest.approx((1 - 0.4914) / 0.247, abs=1e-4)
    assert pixels.dtype == torch.uint8


def test_augmented_images_are_shifted_and_mirrored() -> None:
    image = torch.arange(1, 3 * 64 + 1, dtype=torch.uint8).view(1, 3, 8, 8)
    padded = torch.nn.functional.pad(image[0], (4, 4, 4, 4))
    shifts = [
        padded[:, row : row + 8, column : column + 8] for row in range(9) for column in range(9)
    ]
    possible = [shift.tolist() for shift in shifts] + [shift.flip(2).tolist() for shift in shifts]
    varied = augment(image.expand(400, 3, 8, 8), torch.Generator().manual_seed(0))
    assert varied.dtype == torch.uint8
    seen = {possible.index(one.tolist()) for one in varied}
    assert len(seen) > 120  # of 162


def test_augmented_batches_are_a_function_of_the_seed(tmp_path: Path) -> None:
    write_batches(tmp_path)
    data = load_cifar10(tmp_path)

    def inputs(augmented: bool) -> torch.Tensor:
        return torch.cat([x for x, _ in Batches(data, batch_size=8, seed=0, augmented=augmented)])

    state = torch.random.get_rng_state()
    first = inputs(True)
    assert first.dtype == torch.float32
    assert torch.equal(first, inputs(True))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(first, inputs(False))
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    assert torch.equal(inputs(False), normalize(data.train_inputs[order]))
