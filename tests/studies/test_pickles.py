"""Tests pickles read as data: the values of pickle, nothing executed, bounded memory."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

import spectrain_ext
import studies
from studies.data.pickles import Call, Name, read_pickle

plain = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(2**70), 2**70)
    | some.floats(allow_nan=False)
    | some.text()
    | some.binary(min_size=1),
    lambda inner: (
        some.lists(inner)
        | some.lists(inner).map(tuple)
        | some.dictionaries(some.text() | some.binary(min_size=1) | some.integers(), inner)
    ),
    max_leaves=20,
)


@given(plain, some.sampled_from([2, 3, 4]))
def test_what_pickle_wrote(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_what_would_be_imported_or_called_is_a_record(tmp_path):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),), {"a": 1}

    found = read_pickle(pickle.dumps([Runs(), os.mkdir], 4))
    assert found == [Call("posix.mkdir", (str(tmp_path / "made"),), {"a": 1}), Name("posix.mkdir")]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "its end is missing"),
        (b"\x80\x04]", "its end is missing"),
        (b"\x80\x04\xff.", "has the instruction"),
        (b"\x80\x04" + b"I" + b"9" * 10**6 + b"\n.", "has the instruction 'I'"),  # slow to read
        (b"\x80\x04\x8d" + b"\xff" * 8 + b"x.", r"expected \d+ bytes|exceed|byte count"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fx.", "expected .* bytes"),
        (b"\x80\x04T\xff\xff\xff\x7fx.", "expected .* bytes"),
        (b"\x80\x04\x8b\xff\xff\xff\x7fx.", "has the instruction"),
        (b"\x80\x04.", "IndexError"),
        (b"\x80\x04t.", "IndexError"),
        (b"\x80\x04\x85.", "IndexError"),
        (b"\x80\x04h\x05.", "KeyError"),
        (b"\x80\x04K\x01K\x02a.", "TypeError"),
        (b"\x80\x04})K\x01s.", "TypeError"),
        (b"\x80\x04}(K\x01u.", "zip|TypeError"),
        (b"\x80\x04K\x01)R.", "AttributeError"),
        (b"\x80\x04K\x01K\x01\x93.", "TypeError"),
        (b"\x80\x04]}b.", "TypeError"),
    ],
)
def test_anything_else_is_a_value_error(content, match):
    with pytest.raises(ValueError, match=match):
        read_pickle(content)


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
            read_pickle(content)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


ALLOWED = {
    # the package's own arrays, of only numbers
    ("studies/data/cifar.py", "np.load(allow_pickle=False)"),
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
