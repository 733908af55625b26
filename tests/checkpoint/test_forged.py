"""Tests damaged and forged checkpoints: rejected before anything changes, and never executed."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_cases import (
    batches,
    forge,
    model,
    nest,
    pipeline,
    refused,
    same,
    train,
)
from helpers.foreign_optimizers import Whitened
from hypothesis import given
from hypothesis import strategies as some
from safetensors.torch import load_file, save_file

from spectrain_ext.checkpoint import CheckpointError, ShuffledSampler, load, save

Body = dict[str, Any]
DOCUMENT, MODEL, STATE = "checkpoint.json", "model.safetensors", "state.safetensors"


# Files


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("name", "instead", "match"),
    [
        (DOCUMENT, None, r"c/checkpoint\.json: cannot be read, No such file"),
        (MODEL, None, r"model\.safetensors: cannot be read, No such file"),
        # neither waited for nor read for ever
        (DOCUMENT, os.mkfifo, f"{DOCUMENT}: .*expected a plain file"),
        (MODEL, os.mkfifo, f"{MODEL}: .*expected a plain file"),
        (MODEL, endless, f"{MODEL}: .*expected a plain file"),
    ],
)
def test_something_else_than_a_file(saved: Path, name: str, instead: Any, match: str) -> None:
    (saved / name).unlink()
    if instead is not None:
        instead(saved / name)
    refused(saved, match)


def test_a_file_that_was_cut(saved: Path) -> None:
    os.truncate(saved / MODEL, (saved / MODEL).stat().st_size - 1)
    refused(saved, r"model\.safetensors: damaged, expected \d+ bytes, got \d+")


@pytest.mark.parametrize("name", [MODEL, STATE, DOCUMENT])
@given(place=some.floats(0, 1, exclude_max=True), bit=some.integers(0, 7))
def test_no_changed_bit_goes_unnoticed(
    name: str, place: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / "flipped"
    if not directory.exists():
        save(directory, model(blocks=1), extra=[1.5, "text"])
    path = directory / name
    content = path.read_bytes()
    at = int(place * len(content))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    found = model(seed=1, blocks=1)
    try:
        assert load(directory, found).extra == [1.5, "text"]  # white space has changed
        same(dict(found.state_dict()), dict(model(blocks=1).state_dict()))
    except CheckpointError as error:
        assert str(path) in str(error)
    finally:
        path.write_bytes(content)


class Evil:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_a_pickle_in_place_of_a_file_of_tensors_is_refused(saved: Path) -> None:
    trace, path = saved.parent / "executed", saved / MODEL
    torch.save(Evil(trace), path)
    forge(saved, lambda body: body["files"].update({path.name: path.stat().st_size}))
    refused(saved, r"model\.safetensors: damaged, ")
    assert not trace.exists()


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4, 2), torch.zeros(4, 4).double()])
def test_something_else_than_the_tensor(saved: Path, tensor: torch.Tensor) -> None:
    name, path = "0.linear.weight", saved / MODEL
    save_file(load_file(path) | {name: tensor}, path, metadata={"format": "pt"})

    def change(body: Body) -> None:
        body["files"][MODEL] = path.stat().st_size
        data = tensor.view(-1).view(torch.uint8).numpy()
        body["tensors"][f"model.{name}"]["sha256"] = hashlib.sha256(data).hexdigest()

    forge(saved, change)
    refused(saved, rf"holds something else than the tensor 'model\.{name}'")


def grow(path: Path, name: str, size: int) -> None:
    """Add a tensor of zeros to a file, or replace one by it, without writing the zeros."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    data = len(content) - end
    if name in header:  # the others' bytes stay where they are
        header["rest"] = header.pop(name)
    header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [data, data + size]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    os.truncate(path, 8 + len(text) + data + size)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("0.linear.weight", r"holds something else than the tensor 'model\.0\.linear\.weight'"),
        ("more", "damaged, the SHA-256 of 'more' is not what was saved"),
    ],
)
def test_a_small_file_that_claims_much_costs_little_memory(
    saved: Path, name: str, match: str
) -> None:
    size, path = 1 << 27, saved / (STATE if name == "more" else MODEL)
    grow(path, name, size)

    def change(body: Body) -> None:
        body["files"][path.name] = path.stat().st_size
        if name == "more":
            entry = {"dtype": "uint8", "shape": [size], "file": path.name, "sha256": "0" * 64}
            body["tensors"][name] = entry
            body["processes"][0]["random"]["cuda9"] = {"$tensor": name}

    forge(saved, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(saved, match)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < size >> 12  # KiB


# Documents


DEEP = '{"sha256": "", "checkpoint": ' + 10**5 * "[" + 10**5 * "]" + "}"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "it is no checkpoint document"),
        (b'{"checkpoint": [], "sha256": 3}', "it is no checkpoint document"),
        (b'{"checkpoint": {"format": NaN, "version": 1}, "sha256": ""}', "expected the format"),
        (b'{"checkpoint": {}, "checkpoint": {}}', "a key is there twice"),
        (b'{"checkpoint": ' + b"9" * 10**5 + b"}", "it is no checkpoint document"),
        (b"\xff\xfe\xfd", "it is no checkpoint document"),
        (DEEP.encode(), "it is no checkpoint document"),
    ],
    ids=range(7),
)
def test_what_is_no_document(saved: Path, content: bytes, match: str) -> None:
    (saved / DOCUMENT).write_bytes(content)
    refused(saved, rf"checkpoint\.json: .*{match}")


WEIGHT, BIAS, COUNT = "model.0.linear.weight", "model.0.linear.bias", "0.norm.num_batches_tracked"
MOMENTUM = "optimizer.state.0.linear.bias.momentum_buffer"
NO_STATE = r"has shape {}, expected \[4\]"
BAD_ENTRY = rf"tensors\['{WEIGHT}'\]: bad file, shape or order"


@pytest.mark.parametrize(
    ("key", "change", "match"),
    [
        (WEIGHT, {"dtype": "complex64"}, "is complex64, which does not fit into float32"),
        (WEIGHT, {"dtype": "qint32"}, "'qint32' is no dtype"),
        (WEIGHT, {"dtype": "_dynamo"}, "'_dynamo' is no dtype"),
        (f"model.{COUNT}", {"dtype": "float64"}, "float64, which does not fit into int64"),
        (MOMENTUM, {"dtype": "complex32"}, "has no imaginary part"),
        (MOMENTUM, {"shape": [2, 2]}, NO_STATE.format(r"\[2, 2\]")),
        (MOMENTUM, {"shape": [1]}, NO_STATE.format(r"\[1\]")),
        *((WEIGHT, {"order": order}, BAD_ENTRY) for order in ([0], [0, 0], [0, 2], "01", {})),
        (WEIGHT, {"file": "x"}, BAD_ENTRY),
        (WEIGHT, {"shape": [1] * 100}, BAD_ENTRY),
        (WEIGHT, {"sha256": True}, r"\['sha256'\]: expected a str, got bool"),
        (WEIGHT, {"shape": [-1]}, "a number from 0, got -1"),
        (WEIGHT, {"shape": [4.0]}, r"\['shape'\]\[0\]: expected a int, got float"),
        (WEIGHT, {"file": STATE}, f"{STATE}: damaged"),
    ],
)
def test_forged_entries_of_tensors(saved: Path, key: str, change: Any, match: str) -> None:
    forge(saved, lambda body: body["tensors"][key].update(change))
    refused(saved, match)


def stage(body: Body) -> Body:
    found: Body = body["stages"][0]
    return found


def state(body: Body) -> Body:
    found: Body = stage(body)["optimizer"]["state"]["0.linear.weight"]
    return found


def options(body: Body) -> Body:
    found: Body = stage(body)["optimizer"]["groups"][0]["options"]
    return found


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: b.update(version=1), "expected version 2, got 1"),
        (lambda b: b.update(format="other"), "expected the format .*, got 'other'"),
        (lambda b: b.update(minibatches=-1), "minibatches: expected a number from 0, got -1"),
        (lambda b: b.update(training={"minibatches": -1, "phase": 0}), "training.*from 0, got -1"),
        (lambda b: b.update(processes=[]), "processes: expected one or more"),
        (lambda b: b["files"].update({"../../etc/passwd": 1}), "files: .* is no file of a ch"),
        (lambda b: b["files"].update({f"{MODEL}\0": 0}), "is no file of a checkpoint"),
        (lambda b: b["tensors"].update({"\x1b[31m": []}), r"tensors\['.x1b.*expected a dict"),
        (lambda b: b.pop("stages"), "stages: expected a list, got NoneType"),
        (lambda b: stage(b).pop("random"), r"stages\[0\]: has no 'random'"),
        (lambda b: stage(b).update(stage=True), "expected a int, got bool"),
        (lambda b: stage(b)["weights"].update(more={"$tensor": "none"}), "has no tensor 'none'"),
        (lambda b: stage(b).pop("optimizer"), r"stages\[0\]: has no 'optimizer'"),
        (lambda b: stage(b)["optimizer"].update({"groups": [3]}), r"groups'\]\[0\]: .* got int"),
        (lambda b: state(b).update(momentum_buffer=3), "nothing uses '.*weight.momentum_buffer'"),
        (lambda b: options(b).update(lr="fast"), "lr"),
        (lambda b: options(b).update(lr=float("nan")), "lr"),
        (lambda b: options(b).update(initial_lr="x"), "initial_lr"),
        (lambda b: stage(b).update(scheduler=[1]), "scheduler of stage 0: expected a dict, got a "),
        (lambda b: stage(b).update(scheduler={"step": 3}), "'step' does not fit MultiStepLR"),
        (lambda b: stage(b).update(scheduler={"optimizer": 3}), "'optimizer' does not fit"),
        (lambda b: stage(b)["scheduler"].update(milestones=3), "'milestones' does not fit"),
        (lambda b: stage(b)["scheduler"].update({"$dict": []}), "scheduler"),
    ],
)
def test_forged_documents(saved: Path, change: Callable[[Body], object], match: str) -> None:
    forge(saved, change)
    refused(saved, rf"checkpoint\.json: .*{match}|/c: does not fit .*{match}")


VALUES: list[Any] = [
    {"$tuple": 3},
    {"$dict": [3]},
    {"$dict": [[[1], 2]]},
    {"$dict": [[1, 2], [1, 3]]},
    {"$counter": {}},
    {"$scalar": ["float32", [1, 2]]},
    {"$scalar": ["float32", [[None]]]},
    {"$scalar": ["int8", 1000]},
    {"$scalar": ["_dynamo", 1]},
    {"$scalar": [["float32"], 1]},
    {"$deque": [[1, 2], 1]},
    {"$deque": [[1], True]},
    {"$size": [-1]},
    {"$dtype": "Tensor"},
    {"$numpy": ["object", 1]},
    {"$numpy": ["int8", 300]},
    {"$tensor": "x"},
    {"$other": []},
    {"$tuple": [], "more": 1},
    nest(1, 101),
    {"a": nest({"$tuple": [nest(1, 60)]}, 60)},
]


@pytest.mark.parametrize(
    ("place", "sampler"),
    [
        (lambda b: (b, "extra"), None),
        (lambda b: (b["processes"][0], "sampler"), ShuffledSampler(10, 3)),
        (lambda b: (stage(b), "scheduler"), None),
        (lambda b: (options(b), "lr"), None),
        (lambda b: (stage(b)["optimizer"]["state"]["0.norm.bias"], "a"), None),
    ],
    ids=["extra", "sampler", "scheduler", "options", "state"],
)
def test_values_that_no_save_writes(
    saved: Path, place: Callable[[Body], Any], sampler: ShuffledSampler | None
) -> None:
    """Otherwise an extra value would be noticed only after the weights have been replaced."""
    original, pipe = (saved / DOCUMENT).read_bytes(), pipeline(2, seed=3)
    for value in VALUES:

        def change(body: Body, value: object = value) -> None:
            container, key = place(body)
            container[key] = value

        forge(saved, change)
        refused(saved, r"checkpoint\.json: ", pipe, sampler=sampler)
        (saved / DOCUMENT).write_bytes(original)


def matrices(body: Body) -> list[Body]:
    """Return the document's entry of a list of matrices."""
    found: list[Body] = state(body)["GG"]
    return found


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: matrices(b)[0].update({"$tensor": "GG[7]"}), r"has no tensor 'GG\[7\]', which"),
        (lambda b: matrices(b)[0].update({"$tensor": 3}), r"nothing uses '.*weight\.GG\[0\]'"),
        (lambda b: matrices(b)[0].update(more=3), r"weight\.GG': '\$tensor' with 'opt.*GG\[0\]'"),
    ],
)
def test_forged_containers_of_tensors(
    tmp_path: Path, change: Callable[[Body], object], match: str
) -> None:
    pipe = pipeline(2, optimizer=Whitened, method="vanilla")
    train(pipe, batches(1))
    save(tmp_path / "c", pipe)
    forge(tmp_path / "c", change)
    refused(tmp_path / "c", match, pipe)


@pytest.mark.parametrize(("device", "restored"), [("cuda9", True), ("process1", False)])
def test_generators_of_devices_that_are_not_here(saved: Path, device: str, restored: bool) -> None:
    def change(body: Body) -> None:
        random = body["processes"][0]["random"]
        random[device] = random["cpu"]

    forge(saved, change)
    assert load(saved, pipeline(2, seed=3)).random is restored
