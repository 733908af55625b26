"""Prints, as JSON, what README's pipeline loads and runs, and what an update and a forward enter.

A program of its own, since all that tests have loaded would count: ``footprint.py README.md``.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from inspect import CO_OPTIMIZED
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from spectrain_ext.schedule import Kind

_found = find_spec("spectrain_ext")  # without an import
assert _found is not None and _found.submodule_search_locations is not None
(PACKAGE,) = _found.submodule_search_locations

#: Runs a step of an instruction, for minibatch i and microbatch j.
Handler = Callable[[int, int], None]

#: From Python 3.12 on they are no functions.
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}


class Hook:
    """A profile hook: collects the package's functions that run while it is set, and their depth.

    Bodies of modules and classes, comprehensions, what ``dataclass`` generates, and functions of
    torch and of Python's library do not count, nor do they add to the depth.
    """

    def __init__(self) -> None:
        self.called: list[CodeType] = []
        self.depth = self.deepest = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not _counts(code):
            return
        if event == "call":
            self.called.append(code)
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
        else:
            self.depth -= 1

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        assert self.called, "no function of the package ran"
        files = {code.co_filename for code in self.called}
        counts = {"files": len(files), "depth": self.deepest, "calls": len(self.called)}
        self.called, self.deepest = [], 0
        return counts

    def lines(self) -> int:
        """Return how many lines these functions have; one in another counts once."""
        assert self.called, "no function of the package ran"
        codes = {id(code): code for code in self.called}.values()
        return len({(code.co_filename, line) for code in codes for line in _lines(code)})


def _counts(code: CodeType) -> bool:
    inside = code.co_filename.startswith(PACKAGE)
    return inside and bool(code.co_flags & CO_OPTIMIZED) and code.co_name not in COMPREHENSIONS


def _lines(code: CodeType) -> range:
    ends = [end for _, end, _, _ in code.co_positions() if end is not None]
    return range(code.co_firstlineno, max(ends) + 1)


def _loaded() -> list[str]:
    """Return the package's files that are loaded now, relative to its folder."""
    modules = [module for name, module in sys.modules.items() if name.startswith("spectrain_ext")]
    files = {Path(module.__file__ or "") for module in modules}
    return sorted(str(file.relative_to(PACKAGE)) for file in files if file.suffix == ".py")


def example(readme: Path) -> dict[str, Any]:
    """Run README's pipeline on two batches, and save it."""
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    block = next(block for block in blocks if "st.Pipeline(" in block)
    shorter = re.sub(r"range\(\d+\)]$", "range(2)]", block, flags=re.MULTILINE)
    hook = Hook()
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()):
        sys.setprofile(hook)
        exec(compile(shorter, readme.name, "exec"), names)
        sys.setprofile(None)
    loaded = _loaded()
    with TemporaryDirectory() as folder:
        names["st"].checkpoint.save(Path(folder, "saved"), names["pipe"])
    return {"run": hook.lines(), "loaded": loaded, "loaded with a save": _loaded()}


def instructions() -> dict[str, dict[str, int]]:
    """Return what an update by SGD, and a forward with its receive, load and send, enter.

    Medians of the middle one of three linear layers under ``auto`` with momentum, in the second
    half of a run. The handlers of the steps have depth 1.
    """
    import spectrain_ext as st  # the example comes first: its import counts

    kind = st.passes.Kind
    forward = kind.RECEIVE_ACTIVATION, kind.LOAD_FORWARD, kind.FORWARD, kind.SEND_ACTIVATION
    steps = {"forward": forward, "update": (kind.UPDATE,)}
    found: dict[str, list[dict[str, int]]] = {name: [] for name in steps}

    class Hooked(st.Observer):
        def watch(self, run: Any, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
            hooked = dict(handlers)
            for name, kinds in steps.items() if run.stage.index == 1 else ():
                hook = Hook()
                for each in kinds:
                    to = found[name] if each is kinds[-1] else None
                    hooked[each] = _hooked(handlers[each], hook, to)
            return hooked

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return st.optim.SGD(parameters, lr=0.05, momentum=0.9)

    pipe = st.Pipeline([nn.Linear(8, 8) for _ in range(3)], sgd, nn.functional.mse_loss)
    for _ in pipe.run([(torch.randn(12, 8), torch.randn(12, 8))] * 16, trace=Hooked()):
        pass
    return {name: _medians(taken[len(taken) // 2 :]) for name, taken in found.items()}


def _hooked(handler: Handler, hook: Hook, found: list[dict[str, int]] | None) -> Handler:
    """Return a handler that runs with a hook, and then notes what it has seen, if asked to."""

    def run(i: int, j: int) -> None:
        sys.setprofile(hook)
        handler(i, j)
        sys.setprofile(None)
        if found is not None:
            found.append(hook.take())

    return run


def _medians(found: list[dict[str, int]]) -> dict[str, int]:
    return {name: median_low([each[name] for each in found]) for name in found[0]}


if __name__ == "__main__":
    print(json.dumps({**example(Path(sys.argv[1])), **instructions()}))
