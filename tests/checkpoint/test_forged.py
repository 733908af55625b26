"""Tests damaged and forged checkpoints: rejected before anything changes, and never executed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import checkpoint_cases as cases
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
        (MODEL, None, r"model\.safetensors: damaged, No such file"),
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
    cases.refused(saved, match)


def test_a_file_that_was_cut(saved: Path) -> None:
    os.truncate(saved / MODEL, (saved / MODEL).stat().st_size - 1)
    cases.refused(saved, r"model\.safetensors: damaged, Error while deserializing")


@pytest.mark.parametrize("name", [MODEL, STATE, DOCUMENT])
@given(place=some.floats(0, 1, exclude_max=True), bit=some.integers(0, 7))
def test_no_changed_bit_goes_unnoticed(
    name: str, place: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / "flipped"
    if not directory.exists():
        save(directory, cases.model(blocks=1), extra=[1.5, "text"])
    path = directory / name
    content = path.read_bytes()
    at = int(place * len(content))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    found = cases.model(seed=1, blocks=1)
    try:
        assert load(directory, found).extra == [1.5, "text"]  # white space has changed
        cases.same(dict(found.state_dict()), dict(cases.model(blocks=1).state_dict()))
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
    cases.refused(saved, r"model\.safetensors: damaged, ")
    assert not trace.exists()


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4, 2), torch.zeros(4, 4).double()])
def test_something_else_than_the_tensor(saved: Path, tensor: torch.Tensor) -> None:
    name, path = "0.linear.weight", saved / MODEL
    save_file(load_file(path) | {name: tensor}, path, metadata={"format": "pt"})

    def change(body: Body) -> None:
        data = tensor.view(-1).view(torch.uint8).numpy()
        body["tensors"][f"model.{name}"]["sha256"] = hashlib.sha256(data).hexdigest()

    cases.forge(saved, change)
    cases.refused(saved, rf"holds something else than the tensor 'model\.{name}'")


def grow(path: Path, name: str, size: int) -> None:
    """Replace a tensor in a file by zeros, without writing them."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    data = len(content) - end
    header["rest"] = header.pop(name)  # the others' bytes stay where they are
    header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [data, data + size]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    os.truncate(path, 8 + len(text) + data + size)


def test_a_small_file_that_claims_much_costs_little_memory(saved: Path) -> None:
    size, path = 1 << 27, saved / MODEL
    grow(path, "0.linear.weight", size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cases.refused(saved, r"holds something else than the tensor 'model\.0\.linear\.weight'")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < size >> 12  # KiB


# Documents


DEEP = '{"sha256": "", "checkpoint": ' + 10**5 * "[" + 10**5 * "]" + "}"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "it is no checkpoint document"),
        (b'{"checkpoint": [], "sha256": 3}', "it is no checkpoint document"),
        (b'{"checkpoint": ' + b"9" * 10**5 + b"}", "it is no checkpoint document"),
        (b"\xff\xfe\xfd", "it is no checkpoint document"),
        (DEEP.encode(), "it is no checkpoint document"),
    ],
    ids=range(5),
)
def test_what_is_no_document(saved: Path, content: bytes, match: str) -> None:
    (saved / DOCUMENT).write_bytes(content)
    cases.refused(saved, rf"checkpoint\.json: .*{match}")


WEIGHT, BIAS, COUNT = "model.0.linear.weight", "model.0.linear.bias", "0.norm.num_batches_tracked"
MOMENTUM = "optimizer.state.0.linear.bias.momentum_buffer"
NO_STATE = r"has shape {}, expected \[4\]"
FORGED = "no save writes this: "


@pytest.mark.parametrize(
    ("key", "change", "match"),
    [
        (WEIGHT, {"dtype": "complex64"}, "is complex64, which does not fit into float32"),
        (WEIGHT, {"dtype": "qint32"}, "'qint32' is no dtype"),
        (f"model.{COUNT}", {"dtype": "float64"}, "float64, which does not fit into int64"),
        (MOMENTUM, {"dtype": "complex32"}, f"{STATE}: holds something else than the tensor"),
        (MOMENTUM, {"shape": [2, 2]}, NO_STATE.format(r"\[2, 2\]")),
        (MOMENTUM, {"shape": [1]}, NO_STATE.format(r"\[1\]")),
        *((WEIGHT, {"order": order}, FORGED) for order in ([0], [0, 0], [0, 2], "01")),
        (WEIGHT, {"order": {}}, f"{MODEL}: damaged"),
        *((WEIGHT, {"file": f}, "is no file of a checkpoint") for f in ("x", f"../c/{MODEL}")),
        (WEIGHT, {"shape": [1] * 100}, "has shape"),
        (WEIGHT, {"sha256": True}, f"{MODEL}: damaged, the SHA-256"),
        (WEIGHT, {"file": STATE}, f"{STATE}: damaged"),
    ],
)
def test_forged_entries_of_tensors(saved: Path, key: str, change: Any, match: str) -> None:
    cases.forge(saved, lambda body: body["tensors"][key].update(change))
    cases.refused(saved, match)


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
        (lambda b: b.update(training={"minibatches": 1, "phase": 0}), "progress of .*'undone'"),
        (lambda b: b["tensors"].update({WEIGHT: []}), FORGED),
        (lambda b: b.pop("stages"), FORGED),
        (lambda b: stage(b)["weights"].update(more={"$tensor": "none"}), "has 'more', which the m"),
        (lambda b: stage(b).pop("optimizer"), FORGED),
        (lambda b: state(b).update(momentum_buffer=3), "momentum_buffer must be a tensor, got int"),
        (lambda b: options(b).update(lr="fast"), "lr"),
        (lambda b: options(b).update(lr=float("nan")), "lr"),
        (lambda b: stage(b).update(scheduler=[1]), FORGED),
        (lambda b: stage(b)["scheduler"].update(step=3), "has 'step', which MultiStepLR has not"),
    ],
)
def test_forged_documents(saved: Path, change: Callable[[Body], object], match: str) -> None:
    cases.forge(saved, change)
    cases.refused(saved, rf"checkpoint\.json: .*{match}|/c: does not fit .*{match}")


VALUES: list[Any] = [
    {"$tuple": 3},
    {"$dict": [3]},
    {"$dict": [[[1], 2]]},
    {"$scalar": ["float32", [[None]]]},
    {"$scalar": [["float32"], 1]},
    {"$deque": [[1, 2], -1]},
    {"$dtype": "Tensor"},
    {"$numpy": ["object", 1]},
    {"$tensor": "x"},
    {"$other": []},
    {"$tuple": [], "more": 1},
    cases.nest(1, 150),
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
    original, pipe = (saved / DOCUMENT).read_bytes(), cases.pipeline(2, seed=3)
    for value in VALUES:

        def change(body: Body, value: object = value) -> None:
            container, key = place(body)
            container[key] = value

        cases.forge(saved, change)
        cases.refused(saved, r"checkpoint\.json: |/c: does not fit ", pipe, sampler=sampler)
        (saved / DOCUMENT).write_bytes(original)


def matrices(body: Body) -> list[Body]:
    """Return the document's entry of a list of matrices."""
    found: list[Body] = state(body)["GG"]
    return found


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: matrices(b)[0].update({"$tensor": "GG[7]"}), f"{FORGED}.*'GG.7.'"),
        (lambda b: matrices(b)[0].update({"$tensor": 3}), "does not fit the optimizer of stage 0"),
        (lambda b: matrices(b)[0].update(more=3), r"'\$tensor' with 'opt.*GG\[0\]'"),
    ],
)
def test_forged_containers_of_tensors(
    tmp_path: Path, change: Callable[[Body], object], match: str
) -> None:
    pipe = cases.pipeline(2, optimizer=Whitened, method="vanilla")
    cases.train(pipe, cases.batches(1))
    save(tmp_path / "c", pipe)
    cases.forge(tmp_path / "c", change)
    cases.refused(tmp_path / "c", match, pipe)


def test_generators_of_devices_that_are_not_here(saved: Path) -> None:
    def change(body: Body) -> None:
        random = body["processes"][0]["random"]
        random["cuda9"] = random["cpu"]

    cases.forge(saved, change)
    assert load(saved, cases.pipeline(2, seed=3)).random


# Random changes of a document, which gets a correct digest


BAD_NUMBERS = (
    *(0, 1, -1, 127, 128, 256, 65535, 65536, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**400),
    *(-(2**31), -(2**63), 0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
)
BAD_TEXTS = (
    *("", "x", "..", "/etc/passwd", "\0", "\x1b[31m", "\ud800", "é" * 300, "9" * 5000, "NaN"),
    *("float32", "complex64", "qint8", "bool", "int64", "__class__", "step", "optimizer", "params"),
    *("$tuple", "$dict", "$scalar", "$counter", "checkpoint.json"),
)


def bad_value(rng: random.Random) -> object:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(BAD_NUMBERS)
    if kind == 1:
        return rng.choice((*BAD_TEXTS, None, True, False, [], {}, [[]], [{}], {"": {}}))
    if kind == 2:
        nested: object = rng.choice(BAD_NUMBERS)
        for _ in range(rng.choice((1, 5, 99, 102))):
            nested = rng.choice(([nested], {"a": nested}, {"$tuple": [nested]}))
        return nested
    if kind == 3:
        return [bad_value(rng) for _ in range(rng.randrange(4))]
    return {rng.choice(BAD_TEXTS): bad_value(rng) for _ in range(rng.randrange(3))}


def places(value: object) -> list[tuple[object, object]]:
    """Return every container and key inside a value."""
    if not isinstance(value, (dict, list)):
        return []
    keys = value if isinstance(value, dict) else range(len(value))
    inner = (place for key in keys for place in places(value[key]))
    return [*((value, key) for key in keys), *inner]


def changed_json(rng: random.Random, document: object) -> object:
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        known = places(document)
        if not known:
            break
        container, key = rng.choice(known)
        kind = rng.randrange(5)
        if kind <= 1:
            container[key] = bad_value(rng)
        elif kind == 2:
            del container[key]
        elif kind == 3:
            other, its = rng.choice(known)
            container[key] = copy.deepcopy(other[its])
        elif isinstance(container, list):
            container.insert(rng.randrange(len(container) + 1), bad_value(rng))
        else:
            container[rng.choice(BAD_TEXTS)] = bad_value(rng)
    return document


class Forged:
    """A checkpoint whose document changes and gets a correct digest, and what loads it."""

    def __init__(self, base: Path, make: Any, **more: Any) -> None:
        self.where, self.sampler = base / "checkpoint", ShuffledSampler(10, 3)
        self.make = partial(cases.pipeline, 2, optimizer=cases.nadam, make=make)
        kept = self.make()
        cases.train(kept, cases.batches(3))
        extra = {"a": (1, 2.5), "b": [None, torch.tensor(3)]}
        save(self.where, kept, minibatches=3, sampler=self.sampler, extra=extra, **more)
        self.body = cases.body_of(self.where)
        self.renew()

    def renew(self) -> None:
        self.pipe = self.make(seed=3)
        cases.train(self.pipe, cases.batches(1))
        self.sampler.position = 1
        self.before = self.state()

    def state(self) -> list[object]:
        return [cases.state_of(self.pipe), self.sampler.state_dict(), torch.get_rng_state()]

    def case(self, rng: random.Random) -> None:
        cases.write_body(self.where, changed_json(rng, self.body))
        self.before[2] = torch.get_rng_state()  # each test begins with others
        try:
            load(self.where, self.pipe, sampler=self.sampler)
            self.renew()
        except CheckpointError:
            cases.same(self.state(), self.before)


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> list[Forged]:
    """Return a full checkpoint, and one of trainable weights only."""
    more = {"trainable_only": "verified"}
    return [
        Forged(tmp_path_factory.mktemp("hostile"), cases.model),
        Forged(tmp_path_factory.mktemp("hostile"), cases.tied, **more),
    ]


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 10 else pytest.mark.nightly) for n in range(100)]
)
def test_a_changed_document_is_loaded_or_refused(forged: list[Forged], seed: int) -> None:
    for k in range(5 if seed < 10 else 100):
        begin = time.process_time()
        try:
            forged[seed % 2].case(random.Random(f"{seed} {k}"))
        except Exception as error:
            error.add_note(f"case {k} of seed {seed}")
            raise
        assert time.process_time() - begin < 10, f"case {k} of seed {seed}"
