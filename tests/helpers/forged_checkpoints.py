"""Forges checkpoints, including their digests."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
import torch
from helpers.checkpoint_cases import everything, pipeline, same
from safetensors.torch import load_file, save_file

from spectrain_ext.checkpoint import documents, load
from spectrain_ext.errors import CheckpointError


def refused(directory, match, **more):
    pipe = pipeline(2, seed=3)
    before = {key: tensor.clone() for key, tensor in everything(pipe).items()}
    with pytest.raises(CheckpointError, match=match):
        load(directory, pipe, **more)
    same(everything(pipe), before)


def forge(directory, change):
    """Change the document and correct its digest, as an attacker would."""
    path = directory / documents.NAME
    body = json.loads(path.read_text())["checkpoint"]
    change(body)
    path.write_bytes(documents.file_content(body))


def data_file(directory, kind="model"):
    return directory / f"{kind}.safetensors"


class Evil:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def put(directory, tensors):
    """Replace some weights by others, and correct the digests."""
    path = data_file(directory)
    content = load_file(path) | tensors
    save_file(content, path, metadata={"format": "pt"})

    def change(body):
        body["files"][path.name] = path.stat().st_size
        for name in tensors:
            data = content[name].contiguous().view(-1).view(torch.uint8).numpy()
            body["tensors"][f"model.{name}"]["sha256"] = hashlib.sha256(data).hexdigest()

    forge(directory, change)


def grow(path, name, size):
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


def nest(value, depth):
    for _ in range(depth):
        value = [value]
    return value
