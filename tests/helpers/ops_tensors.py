"""Builds lists of tensors for the operator tests: any layout and bits, between guard bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from helpers import ops_reference as ref
from helpers.covering import Row as Options
from helpers.ops_options import DTYPES, ONE, PLANS, SIZES, WRITTEN
from torch import Tensor

import spectrain_ext as st

_GUARD = 0xFF  # bytes around the tensors; such bits are NaN
_LINE = 64  # bytes of alignment of an allocation
_SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0]


def values(rng: np.random.Generator, kind: str, count: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of numbers of a kind.

    "wide" has all exponents, "special" zeros, infinities, NaN and the type's ends, and "bits" every
    bit pattern alike: NaN with payloads, subnormals.
    """
    if kind == "bits":
        info = torch.iinfo(ref.INTS[dtype])
        raw = rng.integers(info.min, info.max, size=count, dtype=np.int64, endpoint=True)
        return torch.from_numpy(raw).to(ref.INTS[dtype]).view(dtype)
    x = rng.standard_normal(count)
    limits = torch.finfo(dtype)
    if kind == "wide":
        with np.errstate(over="ignore"):
            low, high = math.log2(limits.tiny) - 4, math.log2(limits.max)
            x *= np.exp2(rng.uniform(low, high, count))
    t = torch.from_numpy(x).to(dtype)
    if kind == "special":
        ends = [limits.eps, limits.max, limits.min, limits.tiny, -limits.tiny, limits.tiny / 2]
        special = torch.tensor(
            [*_SPECIAL, *ends, limits.tiny * limits.eps], dtype=torch.float64
        ).to(dtype)
        which = torch.from_numpy(rng.integers(0, len(special), count))
        t = torch.where(torch.from_numpy(rng.random(count) < 0.5), special[which], t)
    return t


def shape_of(count: int, layout: str) -> tuple[int, ...]:
    """Return a shape of about `count` elements; the layouts with an order have four dimensions."""
    if layout not in ("channels last", "permuted"):
        return (count,)
    return (2, 3, count // 6, 1) if count >= 6 else (1, count, 1, 1)


def _strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    order = {"channels last": (0, 2, 3, 1), "permuted": (3, 1, 0, 2)}.get(layout, range(len(shape)))
    strides, width = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = width
        width *= max(1, shape[d])
    return tuple(strides)


class GuardedList:
    """A list of tensors in one buffer of guard bytes, each with a version counter of its own."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        layout: str,
        *,
        shift: Sequence[int],
        device: str = "cpu",
    ) -> None:
        """Where there are gaps, `shift` has the elements from an aligned address to each one."""
        starts = [0] * len(shapes)
        end = _LINE
        numbers = list(range(len(shapes)))
        for i in reversed(numbers) if layout == "backwards" else numbers:
            size = dtypes[i].itemsize
            aligned = -(-end // _LINE) * _LINE + _LINE
            if layout in ("offset", "shifted"):
                starts[i] = aligned + shift[i] * size
            elif layout in ("adjacent", "backwards"):
                starts[i] = -(-end // size) * size
            elif layout == "nearly adjacent":
                starts[i] = -(-end // size) * size + (shift[i] % 3 + 1) * size
            else:
                starts[i] = aligned
            end = starts[i] + math.prod(shapes[i]) * size
        self.buffer = torch.empty(end + _LINE, dtype=torch.uint8, device=device).fill_(_GUARD)
        self._spans = [
            (start, start + math.prod(shape) * dtype.itemsize, dtype)
            for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
        ]
        self.flat = self.views(self.buffer)
        self.tensors = [
            flat.as_strided(shape, _strides(shape, layout)).data
            for flat, shape in zip(self.flat, shapes, strict=True)
        ]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the elements of all tensors in a copy of the buffer, in the order of memory."""
        return [buffer[start:stop].view(dtype) for start, stop, dtype in self._spans]

    def fill(self, rng: np.random.Generator, kind: str, *, positive: bool = False) -> None:
        for flat in self.flat:
            numbers = values(rng, kind, flat.numel(), flat.dtype)
            flat.copy_(numbers.abs() if positive else numbers)

    def check_guards(self, what: str) -> None:
        """Fail if a byte outside the tensors changed."""
        inside = torch.zeros(self.buffer.numel(), dtype=torch.bool)
        for start, stop, _ in self._spans:
            inside[start:stop] = True
        where = ((self.buffer.cpu() != _GUARD) & ~inside).nonzero().flatten().tolist()
        assert not where, f"{what}: bytes {where[:8]} outside the tensors were overwritten"


#: What a call changes: for lists, for some of their tensors, the new elements in memory order, and
#: whether a NaN keeps its bits.
Effects: TypeAlias = dict[tuple[str, int], tuple[Tensor, bool]]


class World:
    """The tensors of a call, in all roles, and a plan over them."""

    def __init__(
        self,
        options: Options,
        seed: int,
        device: str = "cpu",
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """`dtypes` are those of single lists, instead of options' ones."""
        self.rng = np.random.default_rng(seed)
        self._dtypes = dtypes or {}
        self.device, self.values = device, options["values"]
        self.way, self.threads = options["way"], options["threads"]
        self.single = self.way in ONE
        sizes = SIZES[options["sizes"]]
        if self.single:
            sizes = [sizes[self.rng.integers(len(sizes))]]
        self.n = len(sizes)
        kinds = DTYPES[options["dtypes"]]
        first = int(self.rng.integers(len(kinds)))
        self.types = [kinds[(first + i) % len(kinds)] for i in range(self.n)]
        predictions = WRITTEN[options.get("predictions", "none")]
        self.outs = [f"out{j}" for j in range(max(2, len(predictions)))]
        shapes = [shape_of(size, options["layout"]) for size in sizes]
        same = self.rng.integers(1, 18, self.n)
        self.lists: dict[str, GuardedList] = {}
        for name in ("params", "grads", "momentum", "second", "stashed", *self.outs):
            shift = self.rng.integers(1, 18, self.n) if options["layout"] == "shifted" else same
            types = [self._type(name, i) for i in range(self.n)]
            made = GuardedList(shapes, types, options["layout"], shift=shift, device=device)
            made.fill(self.rng, self.values, positive=name == "second")
            self.lists[name] = made
        self.groups = [0] * self.n
        self.n_groups = 1
        if self.way == "groups":
            self.groups = [int(self.rng.integers(3)) for _ in range(self.n - 1)] + [2]
            self.n_groups = 3
        self.missing = [False] * self.n
        self.plans: dict[str, st.Plan] = {}  # by the rule of their state

    def _type(self, name: str, i: int) -> torch.dtype:
        types = self.types[i]
        if name in self._dtypes:
            return self._dtypes[name]
        if name.startswith("out"):
            return types.outs[int(name[3:]) % len(types.outs)]
        of_state = name in ("momentum", "second")
        return types.state if of_state else types.grads if name == "grads" else types.weights

    def argument(self, name: str) -> Any:
        tensors = self.lists[name].tensors
        return tensors[0] if self.single else tensors

    def grads(self) -> Any:
        pairs = zip(self.lists["grads"].tensors, self.missing, strict=True)
        present = [None if missing else grad for grad, missing in pairs]
        return present[0] if self.single else present

    def lists_of_plan(self, kind: str) -> dict[str, Any]:
        moments = {"exp_avgs": "momentum", "exp_avg_sqs": "second"}
        lion = {"exp_avgs": "momentum"}
        state = {"adam": moments, "lion": lion}.get(kind, {"momentum_buffers": "momentum"})
        return {
            **{"params": self.argument("params"), "grads": self.grads()},
            "stashed": self.argument("stashed"),
            "outs": [self.argument(name) for name in self.outs],
            **{key: self.argument(name) for key, name in state.items()},
        }

    def take_gradients(self, missing: str) -> None:
        """Draw other gradients, of which some are missing, for plans too."""
        self.missing = self.draw(missing)
        self.lists["grads"].fill(self.rng, self.values)
        for plan in self.plans.values():
            plan.refresh(self.grads())

    def flat(self, name: str, i: int) -> Tensor:
        return self.lists[name].flat[i].cpu()

    def state(self, i: int, kind: str) -> list[Tensor]:
        names = ("momentum", "second") if kind == "adam" else ("momentum",)
        return [self.flat(name, i) for name in names]

    def draw(self, shares: str) -> list[bool]:
        """Draw a flag for each tensor."""
        if shares == "some":
            return [bool(x) for x in self.rng.integers(0, 2, self.n)]
        return [shares == "all"] * self.n

    def check(
        self, what: str, call: Callable[[], Any], later: Callable[[], Effects], written: list[str]
    ) -> Any:
        """Make a call, compare what it changes, and return its result.

        `later` predicts its effects; it reads stored values after the call where a prediction does.
        `written` are the lists whose version counters a function bumps.
        """
        before = {name: made.buffer.to("cpu", copy=True) for name, made in self.lists.items()}
        counted = {name: [t._version for t in made.tensors] for name, made in self.lists.items()}
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        result = call()
        torch.set_num_threads(threads)
        effects = later()
        for name, made in self.lists.items():
            expected = made.views(before[name])
            exact = [True] * self.n
            for i, values in enumerate(expected):
                if (name, i) in effects:
                    changed, exact[i] = effects[name, i]
                    assert changed.dtype == values.dtype, f"{what}: {name}[{i}]"
                    values.copy_(changed)
            if not torch.equal(made.buffer.cpu(), before[name]):
                for i, now in enumerate(made.flat):
                    compare = ref.assert_bits if exact[i] else ref.assert_same
                    compare(now, expected[i], f"{what}: {name}[{i}]")
                made.check_guards(f"{what}: {name}")
            bumped = [t._version > n for t, n in zip(made.tensors, counted[name], strict=True)]
            bumps = self.way not in PLANS and name in written
            # A step does not write tensors without a gradient, but their outputs.
            skips = what.startswith("step") and not name.startswith("out")
            expects = [bumps and not (skips and missing) for missing in self.missing]
            assert bumped == expects, f"{what}: version counters of {name}"
        return result

    def check_new(self, what: str, result: Any, expected: Sequence[tuple[Tensor, bool]]) -> None:
        """Check an operator's new tensors: they lie in their own memory like the parameters."""
        assert isinstance(result, Tensor) == self.single, what
        made = [result] if self.single else list(result)
        for i, (got, (values, exact)) in enumerate(zip(made, expected, strict=True)):
            like = self.lists["params"].tensors[i]
            assert got.shape == like.shape and got.device == like.device, f"{what}[{i}]"
            assert got.stride() == like.stride() or not got.numel(), f"{what}[{i}]: strides"
            assert got.data_ptr() != like.data_ptr() or not got.numel(), f"{what}[{i}]: memory"
            flat = got.as_strided((got.numel(),), (1,)).cpu()
            (ref.assert_bits if exact else ref.assert_same)(flat, values, f"{what}: result[{i}]")
