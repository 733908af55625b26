"""Tests pickled batches: their fields are read, nothing is executed, memory is bounded."""

from __future__ import annotations

import ast
import contextlib
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import spectrain_ext
import studies
from studies.data.cifar_files import _batch, _fields


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("key", [str, str.encode], ids=["str", "bytes"])
@pytest.mark.parametrize("samples", [1, 2, 300])
@pytest.mark.parametrize("names", [("data", "labels"), ("labels", "data")])
def test_what_pickle_wrote(protocol, key, samples, names):
    images = np.random.default_rng(0).integers(0, 256, (samples, 3072), dtype=np.uint8)
    fields = {"data": images, "labels": [n % 10 for n in range(samples)]}
    batch = {key("batch_label"): key("training batch"), key("num_vis"): 3072}
    batch |= {key(name): fields[name] for name in names}
    batch |= {key("filenames"): [key(f"{n}.png") for n in range(samples)]}
    pixels, labels = _fields(pickle.dumps(batch, protocol))
    assert pixels == images.tobytes()
    assert labels == fields["labels"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04]",
        b"\x80\x04\xff.",
        b"\x80\x04" + b"I" + b"9" * 10**6 + b"\n.",  # slow to read
        b"\x80\x04\x8d" + b"\xff" * 8 + b"x.",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fx.",
        b"\x80\x04T\xff\xff\xff\x7fx.",
        b"\x80\x04\x8b\xff\xff\xff\x7fx.",
    ],
)
def test_anything_else_is_a_value_error(content):
    with pytest.raises(ValueError, match="expected a pickled batch of CIFAR-10"):
        _batch("here", content)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04" + b"]" * 10**6,
        b"\x80\x04" + b"(" * 10**6,
        b"\x80\x04j\xff\xff\xff\x7f.",  # a memo of that size
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x04)" + b"\x85" * 10**6 + b".",  # a tuple in a tuple in a tuple
        b"\x80\x04}" + b")" + b"\x85" * 10**5 + b"K\x01s.",  # and as a key
        b"\x80\x02c_codecs\nencode\nq\x00X\x00\x00\x10\x00" + b"x" * 2**20  # one text, many times
        + b"q\x01X\x06\x00\x00\x00latin1q\x02" + b"h\x00h\x01h\x02\x86R" * 10**4 + b".",
    ],
    ids=["lists", "marks", "memo", "memo-2", "nested", "nested-key", "repeated"],
)  # fmt: skip
def test_memory_and_stack_are_bounded(content):
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            _batch("here", content)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


ALLOWED = {
    # the package's own arrays, of only numbers
    ("studies/data/sources.py", "np.load(allow_pickle=False)"),
}
NEVER = frozenset(
    [
        "pickle",
        "cPickle",
        "_pickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "yaml",
        "jsonpickle",
        "runpy",
    ]
)


def found_in(path: Path) -> set[str]:
    """Return imports and calls of a module that could execute a file's content."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.split(".")[0] in NEVER}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] in NEVER:
                found.add(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            flags = ", ".join(
                f"{k.arg}={ast.unparse(k.value)}"
                for k in node.keywords
                if k.arg in ("allow_pickle", "weights_only")
            )
            last = name.rpartition(".")[2]
            if name in ("eval", "exec", "compile", "__import__") or (
                last in ("load", "fromfile", "memmap", "genfromtxt", "loadtxt")
                and name.split(".")[0] in ("torch", "np", "numpy")
            ):
                found.add(f"{name}({flags})")
    return found


def test_no_file_is_run():
    folders = [Path(spectrain_ext.__file__).parent, Path(studies.__file__).parent]
    found = {
        (path.relative_to(folder.parent).as_posix(), what)
        for folder in folders
        for path in folder.rglob("*.py")
        for what in found_in(path)
    }
    assert found == ALLOWED
