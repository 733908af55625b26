"""Checkpoints that somebody changed, digests and all."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
from helpers.checkpoint_cases import everything, pipeline, same

from spectrain_ext.checkpoint import documents, load
from spectrain_ext.errors import CheckpointError


def refused(directory, match):
    pipe = pipeline(2, seed=3)
    before = {key: tensor.clone() for key, tensor in everything(pipe).items()}
    with pytest.raises(CheckpointError, match=match):
        load(directory, pipe)
    same(everything(pipe), before)


def forge(directory, change):
    """Change the document and make its digest right, as somebody with bad intentions would."""
    path = directory / documents.NAME
    body = json.loads(path.read_text())["checkpoint"]
    change(body)
    path.write_bytes(documents.written(body))


def data_file(directory):
    return directory / "__0_0.distcp"


class Evil:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def put(directory, key, content):
    """Put other bytes at the end of the file, in place of a tensor's."""
    path = data_file(directory)
    start = path.stat().st_size
    content += b"\0" * (5056 - len(content))
    path.write_bytes(path.read_bytes() + content)

    def change(body):
        body["files"][path.name] = start + len(content)
        digest = hashlib.sha256(content).hexdigest()
        body["tensors"][key].update(start=start, bytes=len(content), sha256=digest)

    forge(directory, change)


def nest(value, depth):
    for _ in range(depth):
        value = [value]
    return value
