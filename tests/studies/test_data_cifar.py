"""Tests CIFAR-10 in each of its formats, from small files that the test writes."""

import io
import os
import pickle
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from studies.data import cifar_files
from studies.data.sources import load_cifar10
from studies.data.split import Batches, augment, normalize

TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
CLASSES = [f"class{letter}" for letter in "abcdefghij"]


def _batch(samples: int, seed: int) -> dict[bytes, Any]:
    images = np.random.default_rng(seed).integers(0, 256, (samples, 3072), dtype=np.uint8)
    return {b"data": images, b"labels": [(seed + n) % 10 for n in range(samples)]}


def _python2_pickle(images: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """Imitate Python 2: strings for bytes, and numpy's old module names."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    rows, columns = (b"J" + struct.pack("<i", size) for size in images.shape)
    minus_one = b"J" + struct.pack("<i", -1)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + rows + columns + b"\x86cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03"
    )
    array += text(b"|") + b"NNN" + 2 * minus_one + b"K\x00tb\x89" + text(images.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def _write_folder(folder: Path) -> dict[str, dict[bytes, Any]]:
    folder.mkdir(parents=True)
    batches = {name: _batch(7, seed) for seed, name in enumerate([*TRAIN, "test_batch"])}
    for name, batch in batches.items():
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return batches


def _rows(inputs: torch.Tensor, targets: torch.Tensor) -> list[tuple[bytes, int]]:
    return sorted(
        (image.numpy().tobytes(), int(label)) for image, label in zip(inputs, targets, strict=True)
    )


def _expected(batches: list[dict[bytes, Any]]) -> list[tuple[bytes, int]]:
    return sorted(
        (image.tobytes(), label)
        for batch in batches
        for image, label in zip(batch[b"data"], batch[b"labels"], strict=True)
    )


def _write_jpegs(
    path: Path, *, parts: tuple[str, ...] = ("train", "test"), size: int = 32, mode: str = "w:xz"
) -> None:
    image = pytest.importorskip("PIL.Image")
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for part in parts:
            for number, name in enumerate(CLASSES):
                for sample in range(2):
                    buffer = io.BytesIO()
                    color = (25 * number, 100 * sample, 0 if part == "train" else 255)
                    image.new("RGB", (size, size), color).save(buffer, "JPEG", quality=95)
                    member = tarfile.TarInfo(f"./{part}/{name}/{sample}.jpg")
                    member.size = buffer.tell()
                    archive.addfile(member, io.BytesIO(buffer.getvalue()))


# Pickled batches


@pytest.mark.parametrize("inside", [True, False], ids=["folder-above", "folder-itself"])
def test_pickled_batches_are_read_whole(tmp_path: Path, inside: bool) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    batches = _write_folder(folder)
    data = load_cifar10(tmp_path if inside else folder)
    assert (data.name, data.kind, data.classes) == ("CIFAR-10", "images", 10)
    assert data.train_inputs.shape == (35, 3, 32, 32)
    assert data.train_inputs.dtype == torch.uint8
    assert _rows(data.train_inputs, data.train_targets) == _expected([batches[n] for n in TRAIN])
    assert _rows(data.test_inputs, data.test_targets) == _expected([batches["test_batch"]])


def test_the_archive_gives_what_the_folder_gives(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "cifar-10-batches-py"
    _write_folder(folder)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-py")
    unpacked, packed = load_cifar10(folder), load_cifar10(tmp_path)
    assert torch.equal(unpacked.train_inputs, packed.train_inputs)
    assert torch.equal(unpacked.test_targets, packed.test_targets)
    assert unpacked.fingerprint == packed.fingerprint


def test_the_order_is_fixed_and_mixes_the_batches(tmp_path: Path) -> None:
    batches = _write_folder(tmp_path / "cifar-10-batches-py")
    first, second = load_cifar10(tmp_path), load_cifar10(tmp_path)
    assert torch.equal(first.train_targets, second.train_targets)
    stored = [label for name in TRAIN for label in batches[name][b"labels"]]
    assert first.train_targets.tolist() != stored


def test_what_python_2_wrote_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    batches = _write_folder(folder)
    for name, batch in batches.items():
        (folder / name).write_bytes(_python2_pickle(batch[b"data"], batch[b"labels"]))
    data = load_cifar10(tmp_path)
    assert _rows(data.test_inputs, data.test_targets) == _expected([batches["test_batch"]])


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _pointers() -> bytes:
    """Return an array whose bytes numpy takes for pointers, with only numpy's own names."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    # the dtype's flags, without the one for a list of objects
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R"
    dtype += b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3dtb"
    state = b"(K\x01K\x03\x85" + dtype + b"\x89C\x18" + b"A" * 24 + b"tb"
    return b"\x80\x03}(X\x04\x00\x00\x00data" + array + state + b"X\x06\x00\x00\x00labels](K\x01eu."


@pytest.mark.processes
def test_bytes_of_a_pickle_never_become_pointers(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_folder(folder)
    (folder / "data_batch_1").write_bytes(_pointers())
    child = os.fork()  # numpy would read an object at address 0x4141414141414141
    if child == 0:
        code = 3
        try:
            load_cifar10(tmp_path)
        except ValueError as error:
            code = 0 if "data_batch_1: expected 'data', uint8" in str(error) else 2
        finally:
            os._exit(code)  # after the error, which keeps the array alive
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_folder(folder)
    (folder / "data_batch_2").write_bytes(pickle.dumps(_Runs(tmp_path / "made"), protocol=2))
    with pytest.raises(ValueError, match="data_batch_2: expected 'data', uint8"):
        load_cifar10(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"no pickle", "expected a pickled batch"),
        (pickle.dumps([1]), "expected 'data', uint8 of shape"),
        (pickle.dumps({"data": np.zeros((2, 9), np.uint8)}), r"shape \(samples, 3072\)"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}), "a list of 2"),
        (pickle.dumps(_batch(2, 3), protocol=4)[:-40], "expected a pickled batch"),
        (pickle.dumps({"data": np.zeros((2, 3072), "u1", "F"), "labels": [1, 2]}), "'data', uint8"),
        (pickle.dumps({"data": np.zeros((2, 3072), "i1"), "labels": [1, 2]}), "'data', uint8"),
        (pickle.dumps({"data": np.zeros((1, 3072), "u1"), "labels": [2**70]}), "numbers below 256"),
    ],
    ids=["text", "list", "shape", "labels", "cut-short", "by-columns", "signed", "huge-label"],
)
def test_a_broken_batch_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_folder(folder)
    (folder / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=f"test_batch: .*{expected}"):
        load_cifar10(tmp_path)


def test_a_label_out_of_range_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_folder(folder)
    batch = {"data": np.zeros((1, 3072), np.uint8), "labels": [10]}
    (folder / "test_batch").write_bytes(pickle.dumps(batch))
    with pytest.raises(ValueError, match=r"test labels: .*0 to 9"):
        load_cifar10(tmp_path)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_folder(folder)
    (folder / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_4 is missing"):
        load_cifar10(tmp_path)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-py")
    with pytest.raises(FileNotFoundError, match="data_batch_4 is missing"):
        load_cifar10(tmp_path / "cifar-10-python.tar.gz")


# JPEG files


@pytest.mark.parametrize("suffix", ["", "gz", "bz2", "xz"])
def test_jpeg_files_are_decoded_from_any_tar(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"my-cifar.tar{suffix and '.'}{suffix}"
    _write_jpegs(path, mode=f"w:{suffix}")
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


def test_decoded_images_are_kept_under_the_hash_of_the_file(tmp_path: Path) -> None:
    path, cache = tmp_path / "cifar.tar.xz", tmp_path / "cache"
    _write_jpegs(path)
    before = load_cifar10(path, cache=cache)
    (kept,) = cache.iterdir()
    assert before.fingerprint.startswith(kept.stem.removeprefix("cifar10-"))
    images = before.train_inputs
    written = kept.read_bytes()
    again = load_cifar10(path, cache=cache).train_inputs
    assert torch.equal(again, images)
    assert again.stride() == images.stride(), "a convolution would round otherwise"
    assert [child.name for child in tmp_path.iterdir() if child.name != "cache"] == [path.name]
    kept.write_bytes(written[: len(written) // 2])  # as after an interruption
    assert torch.equal(load_cifar10(path, cache=cache).train_inputs, images)
    assert kept.read_bytes()[: len(written) // 2] == written[: len(written) // 2]
    small = io.BytesIO()
    np.savez_compressed(small, train_images=np.zeros(10**8, np.uint8))  # 100 kB
    kept.write_bytes(small.getvalue())
    assert torch.equal(load_cifar10(path, cache=cache).train_inputs, images)
    assert kept.read_bytes() == written
    _write_jpegs(path, mode="w:gz")
    load_cifar10(path, cache=cache)
    assert len(list(cache.iterdir())) == 2


def test_a_kept_file_saves_the_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cifar.tar"
    _write_jpegs(path, mode="w")
    load_cifar10(path, cache=tmp_path / "cache")

    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(cifar_files, "read_images", refuse)
    load_cifar10(path, cache=tmp_path / "cache")
    with pytest.raises(AssertionError, match="read again"):
        load_cifar10(path)


def test_bad_tars_are_named(tmp_path: Path) -> None:
    path = tmp_path / "cifar.tar.xz"
    _write_jpegs(path, parts=("train",))
    with pytest.raises(FileNotFoundError, match="no test/<class>"):
        load_cifar10(path)
    _write_jpegs(path, size=31)
    with pytest.raises(ValueError, match=r"train/classa/0\.jpg': expected 32x32 pixels"):
        load_cifar10(path)
    path.write_bytes(b"not a tar file")
    with pytest.raises(ValueError, match="expected a whole tar file"):
        load_cifar10(path)
    _write_jpegs(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="expected a whole tar file"):
        load_cifar10(path)


def test_a_file_that_is_no_jpeg_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    with tarfile.open(tmp_path / "cifar.tar", "w") as archive:
        member = tarfile.TarInfo("train/cat/0.jpg")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"jpeg?"))
    with pytest.raises(ValueError, match=r"train/cat/0\.jpg': expected a JPEG file"):
        load_cifar10(tmp_path)


def test_other_classes_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CLASSES", CLASSES[:9])
    _write_jpegs(tmp_path / "cifar.tar", mode="w")
    with pytest.raises(ValueError, match=r"the same 10 classes .* got 'classa', 'classb'"):
        load_cifar10(tmp_path)


def test_a_missing_pillow_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_jpegs(tmp_path / "cifar.tar", mode="w")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -r studies/requirements.txt"):
        load_cifar10(tmp_path)


# Where the files are found


def test_nothing_there_names_all_formats(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError) as caught:
            load_cifar10(path)
        for part in (str(path), "cifar-10-batches-py", "cifar-10-python.tar.gz", "<class>"):
            assert part in str(caught.value)


def test_two_tars_are_ambiguous(tmp_path: Path) -> None:
    for name in ("cifar.tar", "CIFAR10.tar.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"found CIFAR10\.tar\.gz, cifar\.tar; name the file"):
        load_cifar10(tmp_path)


# Conversion to a model's input


def test_normalize_is_zero_mean_unit_variance_of_cifar() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 32, 32)
    black, white = normalize(images)
    assert black[:, 0, 0].tolist() == pytest.approx(
        [-0.4914 / 0.247, -0.4822 / 0.2435, -1.70680], abs=1e-4
    )
    assert white[0, 3, 3].item() == pytest.approx((1 - 0.4914) / 0.247, abs=1e-4)
    assert images.dtype == torch.uint8


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
    _write_folder(tmp_path / "cifar-10-batches-py")
    data = load_cifar10(tmp_path)

    def inputs(seed: int, augmented: bool) -> torch.Tensor:
        batches = Batches(data, batch_size=8, seed=seed, augmented=augmented)
        return torch.cat([x for x, _ in batches])

    state = torch.random.get_rng_state()
    first = inputs(0, True)
    assert first.dtype == torch.float32
    assert torch.equal(first, inputs(0, True))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(first, inputs(0, False))
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    assert torch.equal(inputs(0, False), normalize(data.train_inputs[order]))
