"""Reads randomly changed files under a memory limit: only documented errors may occur.

python hostile_files.py SEED FIRST COUNT SECONDS
"""

from __future__ import annotations

import bz2
import copy
import gzip
import json
import lzma
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
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
from helpers.study_data import FOLDER, archive, jpeg, write_batches

from spectrain_ext.checkpoint import CheckpointError, ShuffledSampler, load, save
from spectrain_ext.schedule import ScheduleError
from spectrain_ext.simulation import read_csv
from spectrain_ext.timelines import merge_traces

sys.path.append(str(Path(__file__).resolve().parents[2]))  # studies, after what is installed

from studies.data.sources import load_cifar10
from studies.results import Run, RunFile

MEMORY = 768 << 20  # bytes above the memory mapped at the start
PATIENCE = 100  # seconds for one case; the machine may be busy

BAD_NUMBERS = (
    *(0, 1, -1, 2, 7, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**62),
    *(2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**31), -(2**63), 0.5, -0.0, 1e308),
    *(float("inf"), float("-inf"), float("nan")),
)
BAD_TEXTS = (
    *("", "x", "..", "/etc/passwd", "\0", "\x1b[31m", "\ud800", "é" * 300, "9" * 5000, "NaN"),
    *("float32", "complex64", "qint8", "bool", "int64", "float8_e4m3fn", "__class__", "step"),
    *("optimizer", "params", "$tuple", "$dict", "$scalar", "$counter", "checkpoint.json"),
)


# Changes


def changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip, cut, repeat, remove, insert, or overwrite with extreme numbers."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8, 40))):
        size = len(found)
        if not size:
            break
        at = rng.randrange(size)
        if rng.random() < 0.3:  # headers and indices are at both ends
            at = rng.choice((at % min(size, 700), size - 1 - at % min(size, 700)))
        length = rng.choice((1, 2, 4, 8, 64, 512, rng.randrange(1, size + 1)))
        kind = rng.randrange(8)
        if kind <= 2:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            found[at:at] = found[at : at + length]
        elif kind == 5:
            del found[at : at + length]
        elif kind == 6:
            byte = rng.choice((b"\0", b"\xff", b"\x7f", b"0", b"9"))
            found[at : at + length] = byte * min(length, 64)
        else:
            number = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, size))
            length = rng.choice((1, 2, 4, 8))
            found[at : at + length] = (number % 256**length).to_bytes(length, "little")
    return bytes(found)


def bad_value(rng: random.Random) -> object:
    kind = rng.randrange(8)
    if kind <= 1:
        return rng.choice(BAD_NUMBERS)
    if kind == 2:
        return rng.choice(BAD_TEXTS)
    if kind == 3:
        return rng.choice((None, True, False, [], {}, [[]], [{}], {"": {}}))
    if kind == 4:
        nested: object = rng.choice(BAD_NUMBERS)
        for _ in range(rng.choice((1, 5, 99, 102, 300))):
            nested = rng.choice(([nested], {"a": nested}, {"$tuple": [nested]}))
        return nested
    if kind == 5:
        tag = rng.choice(("$tuple", "$dict", "$counter", "$scalar", "$other"))
        return {tag: rng.choice((bad_value(rng), [bad_value(rng), bad_value(rng)]))}
    if kind == 6:
        return [bad_value(rng) for _ in range(rng.randrange(4))]
    return {rng.choice(BAD_TEXTS): bad_value(rng) for _ in range(rng.randrange(3))}


def places(value: object) -> list[tuple[object, object]]:
    """Return every container and key inside a value, in any order."""
    found: list[tuple[object, object]] = []
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = container if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], (dict, list)):
                waiting.append(container[key])
    return found


def changed_json(rng: random.Random, document: object) -> object:
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        known = places(document)
        if not known:
            break
        container, key = rng.choice(known)
        kind = rng.randrange(7)
        if kind <= 1:
            container[key] = bad_value(rng)
        elif kind == 2:
            del container[key]
        elif kind == 3:
            other, its = rng.choice(known)
            container[key] = copy.deepcopy(other[its])
        elif kind == 4 and isinstance(container, dict):
            container[rng.choice(BAD_TEXTS)] = container.pop(key)
        elif kind == 5 and isinstance(container[key], (int, float)):
            container[key] += rng.choice((-1, 1, 0.5, 64, -64))
        elif isinstance(container, list):
            container.insert(rng.randrange(len(container) + 1), bad_value(rng))
        else:
            container[rng.choice(BAD_TEXTS)] = bad_value(rng)
    return document


# Kinds of files: the valid file, and one case


class Cifar:
    """Batches in a folder, one of them changed."""

    errors = (ValueError, FileNotFoundError)

    def __init__(self, base: Path) -> None:
        write_batches(base, samples=3)
        self.folder = base / FOLDER
        self.batches = {path: path.read_bytes() for path in sorted(self.folder.iterdir())}

    def case(self, rng: random.Random) -> None:
        path = rng.choice([*self.batches])
        path.write_bytes(changed_pickle(rng, self.batches[path]))
        try:
            load_cifar10(self.folder)
        finally:
            path.write_bytes(self.batches[path])


def changed_pickle(rng: random.Random, content: bytes) -> bytes:
    """Change the instructions instead of the pixels, or return a random program."""
    if rng.random() < 0.6:
        head = rng.choice((120, 300, len(content)))
        if rng.random() < 0.5:
            return content[:-head] + changed_bytes(rng, content[-head:])
        return changed_bytes(rng, content[:head]) + content[head:]
    operations = [bytes([code]) for code in b"]}()tau.sRbNQ02e\x85\x86\x87\x88\x89\x94\x93\x81"]
    operations += [b"K\x05", b"q\x00", b"h\x00", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\xff"]
    operations += [b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"c_codecs\nencode\n", b"U\x02u1"]
    operations += [b"cnumpy.core.multiarray\n_reconstruct\n", b"X\x06\x00\x00\x00latin1"]
    operations += [b"X\x04\x00\x00\x00data", b"X\x06\x00\x00\x00labels", b"C\x03abc"]
    operations += [b"\x8e" + b"\xff" * 8, b"T\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f1", b"L1\n"]
    program = rng.choices(operations, k=rng.choice((5, 20, 100, 5000)))
    repeated = program * rng.choice((1, 1, 1, 1000))
    return b"\x80\x02" + b"".join(repeated)[: 1 << 21] + rng.choice((b".", b"", b"}."))


class Archives:
    """Compressed archives of such batches, or of images with long names."""

    errors = (ValueError, FileNotFoundError)

    def __init__(self, base: Path) -> None:
        self.base = base / "archives"
        batches = write_batches(self.base, samples=1)
        pickles = [(f"{FOLDER}/{name}", pickle.dumps(batch)) for name, batch in batches.items()]
        images = pickles
        with suppress(pytest.skip.Exception):  # without Pillow
            images = [
                (f"{part}/class{k}/{'long' * 30}.jpg", jpeg(color=(25 * k, 0, 0)))
                for part in ("train", "test")
                for k in range(10)
            ]
        self.kinds = [("cifar-10-python.tar.gz", pickles), ("cifar.tar", images)]

    def case(self, rng: random.Random) -> None:
        name, members = rng.choice(self.kinds)
        path, members = self.base / name, [*members]
        victim = rng.randrange(len(members))
        member, content = members[victim]
        inside = rng.random() < 0.3
        if inside:
            members[victim] = (member, changed_bytes(rng, content))
        elif rng.random() < 0.5:
            kind = rng.choice((b"1", b"2", b"3", b"5", b"S", b"L", b"x", b"g", b"Z"))
            members[victim] = (member, kind)
        how = rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
        content = archive(path, members, format=how).read_bytes()
        if not inside and rng.random() < 0.6:
            content = changed_header(rng, content)
        content = rng.choice((bytes, gzip.compress, bz2.compress, lzma.compress))(content)
        if rng.random() < 0.4:
            content = changed_bytes(rng, content)
        path.write_bytes(content)
        load_cifar10(path)


def changed_header(rng: random.Random, content: bytes) -> bytes:
    """Change a header and correct its checksum."""
    found = bytearray(content)
    headers = [at for at in range(0, len(found), 512) if found[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(headers)
    header = found[at : at + 512]
    where, size = rng.choice(((0, 100), (124, 12), (156, 1), (157, 100), (345, 155), (100, 24)))
    octal = (b"77777777777\0", b"00000000000\0", b"-1\0", b"0o17\0", b"\0" * 12)
    other = (b"\x80" + b"\0" * 11, b"\xff" * 12, rng.randbytes(12), b"S", b"L", b"x", b"../../x\0")
    field = rng.choice((*octal, *other))[:size]
    header[where : where + len(field)] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    found[at : at + 512] = header
    return bytes(found)


class Checkpoints:
    """Documents as bytes, documents with a correct digest, and files of tensors."""

    errors = (CheckpointError,)

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
        except CheckpointError:
            same(self.state(), self.before)
            raise
        finally:
            self.document.write_bytes(self.content)
            self.data.write_bytes(self.tensors)
        self.renew()


class Reports:
    errors = (ValueError, ScheduleError)

    def __init__(self, base: Path) -> None:
        self.base = base / "reports"
        self.file = RunFile(self.base, "spectrain-seed3", {"a": 1}, Run)
        self.file.write(Run("spectrain", 3, 0.25, 1.0, 12.5, 4096, (2.0, 1.0)))
        self.run = self.file.path
        self.written = self.run.read_bytes()
        self.trace = {
            "traceEvents": [
                {"name": "process_name", "pid": 0, "ph": "M", "args": {"name": "stage 0"}},
                {"name": "F0", "pid": 0, "tid": 0, "ph": "X", "ts": 1.0, "dur": 2.0},
            ],
            "baseTimeNanoseconds": 5,
        }

    def case(self, rng: random.Random) -> None:
        kind = rng.randrange(3)
        if kind == 0:
            if rng.random() < 0.5:
                self.run.write_bytes(changed_bytes(rng, self.written))
            else:
                self.run.write_text(json.dumps(changed_json(rng, json.loads(self.written))))
            found = self.file.read()
            assert found is None or isinstance(found.seed, int)
        elif kind == 1:
            path = self.base / "trace.json"
            text = json.dumps(changed_json(rng, self.trace)).encode()
            path.write_bytes(changed_bytes(rng, text) if rng.random() < 0.3 else text)
            merge_traces(self.base / "out.json", [path, path])
        else:
            path = self.base / "schedule.csv"
            text = b"0F0,0F1,0F2,0B0,0B1,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n"
            path.write_bytes(changed_bytes(rng, text))
            read_csv(path, microbatches=rng.choice((None, 1, 2, 3, 10**6)))


KINDS = (Cifar, Archives, Checkpoints, Checkpoints, Reports)


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def too_long(*_: object) -> None:
    raise TimeoutError("it took too long")


def main(seed: str, first: int, count: int, seconds: float) -> None:
    """Print the number of cases of each kind and their outcomes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    base = Path(tempfile.mkdtemp())
    signal.signal(signal.SIGALRM, too_long)
    ended: Counter[str] = Counter()
    slowest = (0.0, "")
    try:
        kinds = {kind: kind(base) for kind in dict.fromkeys(KINDS)}
        limit_memory()
        begin = time.monotonic()
        for k in range(first, first + count):
            if time.monotonic() - begin > seconds:
                break
            kind = KINDS[k % len(KINDS)]
            moment = time.process_time()
            signal.alarm(PATIENCE)
            try:
                kinds[kind].case(random.Random(f"{seed} {k}"))
                ended[f"{kind.__name__} read"] += 1
            except kind.errors:
                ended[f"{kind.__name__} refused"] += 1
            except BaseException:
                print(f"case {k} of seed {seed}: {kind.__name__}", file=sys.stderr)
                raise
            finally:
                signal.alarm(0)
            slowest = max(slowest, (time.process_time() - moment, f"{kind.__name__} {k}"))
    finally:
        shutil.rmtree(base)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"ended": ended, "slowest": slowest, "peak_mib": peak}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
