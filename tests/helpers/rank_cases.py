"""Trainings that one process and several ranks run alike, and settings that cover all pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from helpers.covering import Axes
from helpers.foreign_optimizers import ScheduleFree
from helpers.random_settings import FLUSHING
from helpers.replica_programs import steps
from helpers.ways import WAYS, travelling
from torch import Tensor, nn

import spectrain_ext as st

from .passes import with_passes

WIDTH = 6
CONSTANTS = [1, True, 1.0, -0.0, float("inf"), "é\ud800", None]
RUNS = ((8, 8, 5), (0, 8, 8), (4, 8, 1))  # minibatches, samples of each, samples of the last

# A model that hands on values of many kinds


class Out(NamedTuple):
    parts: dict[str, list[Tensor]]
    loss: None = None


class Centred(nn.Module):
    """Subtracts a running mean like a BatchNorm, for any number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def odd(x: Tensor) -> tuple[Tensor | None, ...]:
    """Make tensors of several dtypes and layouts out of one, and an empty place."""
    x = x.detach()
    images = x[..., None, None].expand(-1, -1, 2, 3)
    return (
        images.to(torch.bfloat16).contiguous(memory_format=torch.channels_last),
        None,
        x.argsort(-1),
        x.double().transpose(0, -1) > 0,
        x.double().transpose(0, -1),
        torch.complex(x, -x).conj(),
    )


def check_odd(found: Sequence[Tensor | None], x: Tensor) -> None:
    for got, expected in zip(found, odd(x), strict=True):
        if got is None or expected is None:
            assert got is expected
            continue
        assert torch.equal(got, expected)
        assert (got.dtype, got.is_conj()) == (expected.dtype, False) or got.is_conj()
        assert got.stride() == torch.empty_like(expected).stride()


class Part(nn.Module):
    """A stage of n with random numbers, running statistics and values that need no gradient.

    ``form``: what goes to the next stage: a tensor, a tuple of several dtypes and layouts, a dict
    with constants, or complex numbers.
    """

    def __init__(self, k: int, n: int, form: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = Centred() if k % 2 else nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.first, self.last, self.form = k == 0, k == n - 1, form

    def forward(self, value: Any) -> Any:
        step, count, rest = 0, torch.zeros(2, dtype=torch.long), ()
        if type(value) is dict:
            step, words, value = value["step"], value.get("words"), value["x"]
            if not self.first:
                (value, (count, none)) = value
                assert none is None
                assert repr(words) == repr(CONSTANTS)
        elif isinstance(value, tuple):
            value, count, *rest = value
        x: Tensor = torch.view_as_real(value).flatten(-2) if value.is_complex() else value
        if rest:
            check_odd(rest, x)
        x = x + self.drop(torch.tanh(self.norm(self.linear(x)))) / (1 + step)
        count.fill_(3)  # autograd keeps another tensor of the same message
        if self.last:
            return Out({"h": [x]}) if self.form == "dict" else x
        if self.form == "dict":
            return {"x": [x, (count, None)], "step": step, "words": CONSTANTS}
        if self.form == "complex":
            return torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return (x, count, *odd(x)) if self.form == "tuple" else x


def output_of(value: Any) -> Tensor:
    found: Tensor = value.parts["h"][0] if isinstance(value, Out) else value
    return found


def target_of(target: Any) -> Tensor:
    found: Tensor = target["y"] if type(target) is dict else target
    return found


def loss_fn(output: Any, target: Any) -> Tensor:
    return nn.functional.mse_loss(output_of(output), target_of(target))


def sign_rate(output: Any, target: Any) -> Tensor:
    return ((output_of(output) > 0) == (target_of(target) > 0)).float().mean()


class Ordered:
    """A metric with a state that must see all batches, in their order."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, output: Any, target: Any) -> None:
        self.seen.append(output_of(output).double().sum(-1))

    def compute(self) -> Tensor:
        seen = torch.cat(self.seen)
        return (seen * torch.arange(len(seen))).sum()


# Settings


@dataclass(frozen=True)
class Case:
    """A setting. Its fields but ``method`` are the axes of the covering set."""

    method: str | st.Method
    layout: tuple[int, int] = (2, 1)  # ranks, and stages on each
    form: str = "tensor"
    way: str = "direct"
    memory: str = "kept"
    codec: str = "none"
    clip: str = "none"
    optimizer: str = "SGD"
    ties: str = "none"  # stages with the weight of the first of them
    sizes: str = "smaller"
    losses: str = "last"  # or shared with all ranks

    @property
    def name(self) -> str:
        return self.method if isinstance(self.method, str) else self.method.name

    @property
    def ranks(self) -> int:
        return self.layout[0]

    @property
    def n(self) -> int:
        return self.layout[0] * self.layout[1]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments of both pipelines."""
        found: dict[str, Any] = {"method": self.method, "microbatches": 2}
        found |= {"codec": CODECS[self.codec], **MEMORY[self.memory], **CLIPS[self.clip]}
        if self.name in ("pipedream-2bw", "error-feedback", "zb-h1"):
            found["microbatches"] = self.n
        if self.name in ("interleaved", "interleaved-async", "wpipe"):
            found["microbatches"] = max(2, self.n // 2)
        return found

    def stages(self) -> list[Part]:
        torch.manual_seed(3)
        made = [Part(k, self.n, self.form) for k in range(self.n)]
        first, *others = TIES[self.ties] or (0,)
        for k in others:
            made[k % self.n].linear.weight = made[first].linear.weight
            made[k % self.n].cut = st.partitioning.Cut(
                ties={"linear.weight": (first, "linear.weight")}
            )
        return made

    def pipeline(self, rank: int | None = None, **more: Any) -> st.Pipeline:
        """Return the pipeline of one rank, or that of one process."""
        stages = self.stages()
        torch.manual_seed(5)
        given = {"scheduler": steps, **self.settings}
        if rank is None:
            return st.Pipeline(stages, self.make_optimizer, loss_fn, **with_passes(given))
        # a long timeout, on machines that are busy with other tests
        given |= {"share_loss": self.losses == "shared", "timeout": 90.0, **more}
        mine = stages[rank :: self.ranks]
        part = mine if len(mine) > 1 else mine[0]
        return st.DistributedPipeline(part, self.make_optimizer, loss_fn, **with_passes(given))

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "Muon":
            return st.optim.Muon(params, lr=0.01, hidden=[p for p in params if p.dim() == 2])
        if self.optimizer == "SGD":
            smoothed = self.name == "spectrain-smoothed"
            more = {"momentum": 0.9, "weight_decay": 0.01, "smoothed": smoothed}
            return st.optim.SGD(params, lr=0.03, **more)
        kinds = {"Adam": st.optim.Adam, "RMSprop": torch.optim.RMSprop, "modes": ScheduleFree}
        return kinds[self.optimizer](params, lr=0.005)

    def batches(self, sizes: Sequence[int], seed: int = 11) -> list[Any]:
        g = torch.Generator().manual_seed(seed)
        found: list[Any] = []
        for step, size in enumerate(sizes):
            x, y = torch.randn(2, size, WIDTH, generator=g)
            found.append({"x": x, "y": y, "step": step} if self.form == "dict" else (x, y))
        return found

    def runs(self) -> Iterator[list[Any]]:
        for count, size, last in RUNS:
            sizes = [size] * (count - 1) + [last] * (count > 0)
            if self.sizes == "growing":
                sizes = [2 + 3 * (n % 5) for n in range(count)]
            batches = self.batches(sizes)
            if self.clip == "skips" and batches:
                self._poison(batches[1])
            yield batches

    def _poison(self, batch: Any) -> None:
        """Make the loss nan; running statistics and random numbers are those of before, then."""
        x, y = (batch["x"], batch["y"]) if self.form == "dict" else batch
        (y if self.form == "tuple" else x)[..., -1, 2] = float("nan")


MEMORY: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"recompute": True},
    "offloaded": {"offload": "activations"},
    "wide windows": {"window": "wide"},
}
CODECS = {
    "none": None,
    "Int8": st.codecs.Int8(block=8),
    "both": (st.codecs.Int4(hadamard=True), st.codecs.BFloat16()),
    "gradients": (None, st.codecs.Int8(block=128)),
}
CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "stage": {"clip_norm": 0.05, "clip_scope": "stage"},
    "global": {"clip_norm": 0.05, "clip_scope": "global"},
    "auto": {"clip_norm": 0.05},
    "skips": {"on_nonfinite": "skip"},
}
TIES = {"none": (), "two": (0, -1), "three": (0, 1, -1)}
AXES: dict[str, Sequence[Any]] = {
    "layout": ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)),
    "form": ("tensor", "tuple", "dict", "complex"),
    "way": WAYS,
    "memory": tuple(MEMORY),
    "codec": tuple(CODECS),
    "clip": tuple(CLIPS),
    "optimizer": ("SGD", "Adam", "Muon", "RMSprop"),
    "ties": tuple(TIES),
    "sizes": ("smaller", "growing"),
    "losses": ("last", "shared"),
}


# Every method, and every pair of values of two axes; a method counts as its family

OWN_ORDER = ("interleaved-async", "wpipe", "zb-h1-async")
STALE = (
    *("vanilla", "pipedream", "pipedream-vertical-sync", "pipedream-2bw", "auto", "lwp-w"),
    *("pipemare", "pipemare-t1", "pipemare-t2"),
)
HYBRIDS = (
    "pipedream+sync@7",
    "1f1b+vanilla@8",  # at the end of a run
    st.hybrid("auto", "1f1b", after=3),
)
PREDICTING = tuple({*st.methods()} - {*FLUSHING, *OWN_ORDER, *STALE, "xgrad"})  # xgrad: one stage
FAMILIES: dict[str, tuple[str | st.Method, ...]] = {
    **{"flushes": FLUSHING, "order of its own": OWN_ORDER, "stale": STALE},
    **{"predicts": tuple(sorted(PREDICTING)), "changes": HYBRIDS},
}
METHODS = tuple(method for methods in FAMILIES.values() for method in methods)
_OF_SGD = ("spectrain-smoothed", "sc", "sc-lwp", "braking")
_WITHOUT_MUON = (*_OF_SGD, "dc-asgd", "gap-aware")
_OWN_WINDOWS = (*FLUSHING, *OWN_ORDER[:2], *HYBRIDS, "pipedream-2bw", "error-feedback")
SETTINGS = Axes(
    {"method": METHODS, **AXES},
    [
        {"clip": ["global"], "method": {*METHODS} - {*FLUSHING}},
        {"memory": ["wide windows"], "method": _OWN_WINDOWS},
        {"memory": ["wide windows"], "clip": ["global"]},
        {"optimizer": ["RMSprop"], "method": PREDICTING},
        {"optimizer": ["Muon"], "method": _WITHOUT_MUON},
        {"optimizer": ["Adam"], "method": _OF_SGD},
        # The tuple's values are checked to the bit, and codecs change them.
        {"form": ["tuple"], "codec": {*CODECS} - {"none"}},
    ],
    {
        "family": ("method", {m: name for name, methods in FAMILIES.items() for m in methods}),
        "any": ("losses", dict.fromkeys(AXES["losses"], 0)),
    },
    [
        *itertools.combinations(AXES, 2),
        *(("family", axis) for axis in AXES),
        ("method", "any"),
    ],
)


def covering(seed: int = 0) -> list[Case]:
    return [Case(**row) for row in SETTINGS.covering(seed)]


# The same training in one process and on ranks


def train(pipe: st.Pipeline, case: Case, feeds: bool) -> dict[Any, Any]:
    """Train, evaluate and call a pipeline; return all that can be seen of it on this process.

    Entries by number belong to that stage, "last" to the last one, and "all" to every process.
    """
    torch.manual_seed(7)
    test = case.batches((6, 11, 3, 1), seed=12)
    metrics = {"loss": loss_fn, "signs": sign_rate, "ordered": Ordered()}
    losses, kept, measured, spans = [], [], [], []

    def measure(given: Any, *metrics: Any) -> None:
        measured.append(pipe.evaluate(given if feeds else None, *metrics))

    measure(test, metrics)
    for batches in case.runs():
        trace = st.Trace()
        results, before = [], [scheduler.last_epoch for scheduler in pipe.schedulers]
        for result in pipe.run(batches if feeds else None, keep=sign_rate, trace=trace):
            results.append(result)
            made = {s.last_epoch - n for s, n in zip(pipe.schedulers, before, strict=True)}
            # a stage before a gradient that is not finite updates, and the others skip that
            assert case.clip == "skips" or made == {len(results)}
        assert [result.index for result in results] == list(range(len(batches)))
        losses += [result.loss.item() if result.has_loss else None for result in results]
        kept += [result.kept for result in results]
        # On ranks, a stage may load before it hears that the run has ended.
        spans += [span for span in trace.spans() if span.minibatch < len(batches)]
    measure(iter(test))
    seen: list[int] = []
    given = case.batches((6, 6, 6)) if feeds else None
    means = pipe.fit(given, 2, [lambda result: seen.append(result.index)])
    assert seen == list(range(6))
    trained = {key: value.clone() for key, value in pipe.state_dict().items()}
    measure(test, metrics)
    pipe.eval()
    with torch.no_grad():
        output = pipe(test[1] if case.form == "dict" else test[1][0]) if feeds else pipe(None)
    pipe.train()
    state = pipe.state_dict()
    output = None if output is None else output_of(output)
    found: dict[Any, Any] = {
        "all": [measured, means, pipe.minibatches, torch.rand(())],
        "last": {"losses": losses, "kept": kept, "output": output},
    }
    each = zip(pipe.places, pipe.optimizers, pipe.random, pipe.skipped, strict=True)
    for place, opt, numbers, skipped in each:
        k = place.stage
        found[k] = {
            "state": {key: v.clone() for key, v in state.items() if key.startswith(f"{k}.")},
            "trained": {key: v for key, v in trained.items() if key.startswith(f"{k}.")},
            "optimizer": opt.state_dict()["state"],
            "random": numbers.states(),
            "skipped": skipped,
            "versions": [
                (str(span.kind), span.minibatch, span.microbatch, span.version)
                for span in spans
                if span.stage == k and span.version is not None
            ],
        }
    return found


def alone(case: Case) -> dict[Any, Any]:
    return train(case.pipeline(), case, True)


def on_ranks(rank: int, ranks: int, cases: Sequence[Case]) -> list[dict[Any, Any]]:
    """Return what this rank sees of each case."""
    found = []
    for case in cases:
        try:
            with travelling(case.way):
                found.append(train(case.pipeline(rank), case, rank == 0))
        except BaseException as error:
            error.add_note(f"in {case}")
            raise
    return found


def same(found: Any, expected: Any, where: str) -> None:
    """Check that two nested values are the same to the bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            same(found[key], value, f"{where}: {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for n, value in enumerate(expected):
            same(found[n], value, f"{where}: {n}")
    elif isinstance(expected, Tensor):
        close = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
        torch.testing.assert_close(found, expected, **close, msg=where)
    else:
        assert found == expected or (found != found and expected != expected), where
