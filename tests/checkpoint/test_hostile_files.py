"""Tests randomly changed checkpoints: loaded, or refused by an error that changes nothing."""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_cases import (
    batches,
    body_of,
    nadam,
    pipeline,
    same,
    state_of,
    train,
    write_body,
)

from spectrain_ext.checkpoint import CheckpointError, ShuffledSampler, load, save

BAD_NUMBERS = (
    *(0, 1, -1, 127, 128, 256, 65535, 65536, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**400),
    *(-(2**31), -(2**63), 0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
)
BAD_TEXTS = (
    *("", "x", "..", "/etc/passwd", "\0", "\x1b[31m", "\ud800", "é" * 300, "9" * 5000, "NaN"),
    *("float32", "complex64", "qint8", "bool", "int64", "__class__", "step", "optimizer", "params"),
    *("$tuple", "$dict", "$scalar", "$counter", "checkpoint.json"),
)


# Changes


def changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip, cut, repeat, remove or overwrite."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8, 40))):
        size = len(found)
        if not size:
            break
        at = rng.randrange(size)
        if rng.random() < 0.3:  # headers and indices are at both ends
            at = rng.choice((at % min(size, 700), size - 1 - at % min(size, 700)))
        length = rng.choice((1, 2, 4, 8, 64, 512, rng.randrange(1, size + 1)))
        kind = rng.randrange(7)
        if kind <= 2:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            found[at:at] = found[at : at + length]
        elif kind == 5:
            del found[at : at + length]
        else:
            byte = rng.choice((b"\0", b"\xff", b"\x7f", b"0", b"9"))
            found[at : at + length] = byte * min(length, 64)
    return bytes(found)


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


class Changed:
    """A checkpoint whose document or tensors change, and a pipeline that loads it."""

    def __init__(self, base: Path) -> None:
        torch.manual_seed(0)
        self.where = base / "checkpoint"
        pipe = pipeline(2, optimizer=nadam)
        train(pipe, batches(3))
        self.sampler = ShuffledSampler(10, 3)
        save(
            self.where,
            pipe,
            minibatches=3,
            sampler=self.sampler,
            extra={"a": (1, 2.5), "b": [None, torch.tensor(3)]},
        )
        self.document = self.where / "checkpoint.json"
        self.content = self.document.read_bytes()
        self.body = body_of(self.where)
        self.data = self.where / "state.safetensors"
        self.tensors = self.data.read_bytes()
        self.renew()

    def renew(self) -> None:
        self.pipe = pipeline(2, seed=3, optimizer=nadam)
        train(self.pipe, batches(1))
        self.sampler.position = 1
        self.before = self.state()

    def state(self) -> list[object]:
        return [state_of(self.pipe), self.sampler.state_dict(), torch.get_rng_state()]

    def case(self, rng: random.Random) -> None:
        kind = rng.randrange(4)
        if kind == 0:
            self.document.write_bytes(changed_bytes(rng, self.content))
        elif kind == 1:
            write_body(self.where, changed_json(rng, self.body))
        elif kind == 2:
            self.data.write_bytes(changed_bytes(rng, self.tensors))
        else:  # a file with its present size, which only reading reveals
            content = changed_bytes(rng, self.tensors)
            body = copy.deepcopy(self.body)
            body["files"][self.data.name] = len(content)
            self.data.write_bytes(content)
            write_body(self.where, body)
        try:
            load(self.where, self.pipe, sampler=self.sampler)
            self.renew()
        except CheckpointError:
            same(self.state(), self.before)
        finally:
            self.document.write_bytes(self.content)
            self.data.write_bytes(self.tensors)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Changed:
    return Changed(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 10 else pytest.mark.nightly) for n in range(100)]
)
def test_a_changed_checkpoint_is_loaded_or_refused(checkpoint: Changed, seed: int) -> None:
    for k in range(5 if seed < 10 else 100):
        begin = time.process_time()
        try:
            checkpoint.case(random.Random(f"{seed} {k}"))
        except Exception as error:
            error.add_note(f"case {k} of seed {seed}")
            raise
        assert time.process_time() - begin < 10, f"case {k} of seed {seed}"
