"""Interrupts the package at chosen lines, as Ctrl-C does, and checks its state afterwards."""

from __future__ import annotations

import copy
import signal
import sys
from linecache import getline
from pathlib import Path

import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext.rng import RNG_LOCK

from .passes import with_passes

PACKAGE = str(Path(st.__file__).parent)
MINIBATCHES = 5


class Interrupts:
    """Raises SIGINT at chosen line events inside ``with``.

    Lines of the package are counted from 0; each number counts from the previous interrupt. With
    ``within``, only lines of functions with these names are counted.

    Attributes:
        lines: the line events since the last interrupt.
        left: numbers still to come.
    """

    def __init__(self, *numbers, within=()):
        self.left = list(numbers)
        self._within = within
        self.lines = 0

    def __enter__(self):
        self._outer, self._handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        sys.settrace(self._outer)
        signal.signal(signal.SIGINT, self._handler)
        # A signal never arrives on the way out of `with RNG_LOCK`, between its last line and its
        # release; a trace function does.
        while RNG_LOCK._is_owned():
            RNG_LOCK.release()

    def _call(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame, event, arg):
        if event == "line" and (not self._within or frame.f_code.co_name in self._within):
            if self.left and self.lines >= self.left[0] and not _covered_by_nothing(frame):
                del self.left[0]
                self.lines = 0
                # Python removes a trace function that raises. The next code restores it.
                sys.setprofile(self._again if self.left else None)
                signal.raise_signal(signal.SIGINT)
                sys.setprofile(None)  # the interrupt was deferred
            self.lines += 1
        return self._line

    def _again(self, frame, event, arg):
        sys.setprofile(None)
        sys.settrace(self._call)
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                frame.f_trace = self._line
            frame = frame.f_back


def _covered_by_nothing(frame):
    """Whether it is at a ``try:``: there Python 3.11 has no handler, and no signal ever arrives."""
    return getline(frame.f_code.co_filename, frame.f_lineno).strip() == "try:"


class Case:
    """A small pipeline that always starts from the same weights, and its weight versions."""

    def __init__(self, method, *, dtype=torch.float32, optimizer=None, ties=False, **settings):
        torch.manual_seed(3)
        self._stages = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(dtype) for _ in range(3)]
        self._ties = ties
        if ties:
            self._stages[2][0].bias = self._stages[0][0].bias
        size = 2 * settings.get("microbatches", 1)
        drawn = torch.randn(MINIBATCHES, 2, size, 3).to(dtype)
        self.data = [(x, y) for x, y in drawn]
        self._optimizer = optimizer or sgd
        self._settings = {"method": method, **settings}
        # by minibatches of training, and then by stage
        self._versions = [self._trained(count) for count in range(MINIBATCHES + 1)]
        self._after: dict[tuple[int, ...], list[dict[str, torch.Tensor]]] = {}

    def pipe(self):
        return self.pipe_of(self.modules())

    def modules(self):
        return copy.deepcopy(self._stages)

    def pipe_of(self, modules):
        return st.Pipeline(
            modules, self._optimizer, nn.functional.mse_loss, **with_passes(self._settings)
        )

    def _trained(self, count):
        pipe = self.pipe()
        list(pipe.run(self.data[:count]))
        return self.state(pipe)

    def state(self, pipe):
        """Return weights (or master weights) and momentum of each stage."""
        masters, found = pipe.masters(), []
        for k, opt in enumerate(pipe.optimizers):
            tensors = moments(opt)
            for n, p in enumerate(params_of(opt)):
                tensors[f"w{n}"] = masters.get(p, p)
                rounded = pipe.state_dict()[f"{k}.0.{'weight' if n == 0 else 'bias'}"]
                assert torch.equal(p, rounded)
                assert torch.equal(rounded, tensors[f"w{n}"].to(p.dtype))
            found.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
        return found

    def check(self, pipe):
        """Check that every stage has one complete version, and that training continues from it."""
        if self._ties:
            assert torch.equal(*(pipe.state_dict()[f"{k}.0.bias"] for k in (0, 2)))
        found, made = self.state(pipe), []
        for k, mine in enumerate(found):
            equal = [u for u, version in enumerate(self._versions) if same(mine, version[k])]
            assert equal, (k, mine)
            made.append(equal[0])
        key = tuple(made)
        if key not in self._after:
            self._after[key] = self._trained_from(found)
        list(pipe.run(self.data[:3]))
        for mine, expected in zip(self.state(pipe), self._after[key], strict=True):
            assert same(mine, expected), (mine, expected)

    def _trained_from(self, state):
        """Return the weights that a new pipeline trains from these."""
        pipe = self.pipe()
        masters = pipe.masters()
        for opt, parts in zip(pipe.optimizers, state, strict=True):
            saved = opt.state_dict()
            for n, p in enumerate(params_of(opt)):
                p.data.copy_(parts[f"w{n}"])
                if p in masters:
                    masters[p].copy_(parts[f"w{n}"])
                own = {name[2:]: t for name, t in parts.items() if name.startswith(f"{n}.")}
                if own:
                    saved["state"].setdefault(n, {}).update(own)
            opt.load_state_dict(saved)
        list(pipe.run(self.data[:3]))
        return self.state(pipe)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def sgd(params):
    return st.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3)


def adam(params):
    return st.optim.AdamW(params, lr=0.01)


def foreign(params):
    """Return an optimizer of torch's; no interrupt occurs in a line of its step."""
    return torch.optim.AdamW(params, lr=0.01)


def groups(params):
    """Return an optimizer with two groups of one kernel each: with and without momentum."""
    first, second = params
    return st.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": [second]}], lr=0.1)


def moments(optimizer):
    entries = optimizer.state_dict()["state"].items()
    found = {f"{n}.{key}": tensor for n, entry in entries for key, tensor in entry.items()}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
