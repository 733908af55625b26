"""Contenders and workloads of a study: what is compared, and on what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from spectrain_ext.cli.options import method_of
from spectrain_ext.method import Method, delay, find_method, hybrid, recipe_clip, second_order
from spectrain_ext.method.formulas import RatesByDelay, none, rest_of_delay
from spectrain_ext.operators.averaging import Averaging, Elastic, Sparse
from spectrain_ext.schedule import Law, Place


class Contender(NamedTuple):
    """A method with what it has otherwise than the workload.

    Attributes:
        method: the method.
        changes: fields of ``TrainSettings``.
        careful: the share of a synchronous run over which learning rates rise from lr/D to lr on a
            stage with delay D (PipeMare's T1); 0: what the method does.
        change: the share of a synchronous run's updates after which the method changes; 0: when it
            says that it does.
        replicas: with ``averaging``, of whole pipelines, each with its own microbatches.
        averaging: how their weights are averaged; None: there is one.
        uniform: whether all of N stages are late by N - 1 updates, as the first is; instead of the
            delays of a pipeline.
    """

    method: Method
    changes: Mapping[str, Any] = {}
    careful: float = 0.0
    change: float = 0.0
    replicas: int = 1
    averaging: Averaging | None = None
    uniform: bool = False

    def over(self, updates: int) -> Method:
        """The method in a comparison with so many updates of a synchronous run."""
        method = self.method
        if self.careful:
            method = _in_the_end(method, rates=RatesByDelay(self.careful * updates))
        if self.change and method.then is not None:
            moment = round(self.change * updates)
            method = replace(method, then=replace(method.then, after=moment, gap=None))
        return method


def _in_the_end(method: Method, **fields: Any) -> Method:
    """The method with other fields in its last phase."""
    if method.then is None:
        return replace(method, **fields)
    last = _in_the_end(method.then.method, **fields)
    return replace(method, then=replace(method.then, method=last))


def contender(name: str) -> Contender:
    """A method by its name or as ``module:NAME``, or another that is only compared with.

    Raises:
        ValueError: there is none of that name, or as ``method_of``.
    """
    return _EXTRA.get(name) or Contender(method_of(name))


def _even(law: Law) -> Method:
    """Every stage predicts as far as stage 0 has to, by another law than the second-order one."""
    return Method(f"{law}-even", "", law=law, forward_horizon=_farthest, backward="stash")


def _farthest(place: Place) -> int:
    return delay(place) + rest_of_delay(place)


_SYNC_AHEAD = Method(
    "sync-ahead",
    "",
    schedule="gpipe",
    law="second-order",
    forward_horizon=lambda place: 1,
    backward="stash",
)
#: The pipeline of arXiv 1912.12675: nothing kept, 2(N - 1 - k) updates late.
_STALE = replace(
    find_method("vanilla"), name="stale", window=lambda k, stages, parts: 2 * (stages - k) - 1
)


def _averaged(
    method: Method, replicas: int, averaging: Averaging, changes: Mapping[str, Any] = {}
) -> Contender:
    """As many microbatches as replicas, or that for each where a method has several."""
    each = 4 if method.name == "auto" else 1
    parts = {**changes, "microbatches": each * replicas}
    return Contender(method, parts, replicas=replicas, averaging=averaging)


_MESH = Sparse(share=0.05, delay=10, decay=0.5)
_SLOW = {"betas": (0.95, 0.999)}
_EXTRA = {
    # what looking ahead gives by itself, without any delay
    "sync-nadam": Contender(find_method("sync"), {"optimizer": "nadam"}),
    "sync-nesterov": Contender(find_method("sync"), {"nesterov": True}),
    "sync-ahead": Contender(_SYNC_AHEAD),
    "sync-b95": Contender(find_method("sync"), _SLOW),
    # arXiv 2505.01099
    "nesterov-async": Contender(
        find_method("pipedream"), {"optimizer": "nadam", "betas": (0.99, 0.999)}
    ),
    "linear-even": Contender(_even("linear")),
    "difference-even": Contender(_even("difference")),
    # four replicas, each with a quarter of the minibatch: BatchNorm's statistics are a quarter's
    "data-parallel-4": Contender(find_method("sync"), {"microbatches": 4}),
    **{
        f"{name}-4": Contender(find_method(name), {"microbatches": 4})
        for name in ("vanilla", "spectrain", "auto")
    },
    # AvgPipe: replicas with a part of the minibatch each; a*r is .9, as in arXiv 1412.6651
    **{f"elastic-{r}": _averaged(find_method("sync"), r, Elastic(0.9 / r)) for r in (2, 4)},
    **{f"auto-elastic-{r}": _averaged(find_method("auto"), r, Elastic(0.9 / r)) for r in (2, 4)},
    # AsyncMesh, arXiv 2601.22442, with its public code's share, delay and first decay
    **{f"sparse-{r}": _averaged(find_method("sync"), r, _MESH) for r in (2, 4)},
    "mesh-2": _averaged(
        find_method("pipedream"), 2, _MESH, {"optimizer": "nadam", "betas": (0.99, 0.999)}
    ),
    # arXiv 2606.30634 and 2602.03515
    **{
        f"{name}-{kind}": Contender(find_method(name), {"optimizer": kind})
        for kind in ("muon", "soap")
        for name in ("sync", "vanilla", "pipedream", "pipedream-2bw", "auto")
    },
    **{
        f"{name}-rotation": Contender(find_method(name), {"optimizer": "basis-rotation"})
        for name in ("pipedream", "auto")
    },
    "second-order-all": Contender(replace(second_order(lead=none), forward_horizon=_farthest)),
    "second-order-all-lead-1": Contender(
        replace(second_order(lead=lambda place: 1), forward_horizon=_farthest)
    ),
    "second-order-lead0": Contender(second_order(lead=none)),
    "second-order-lead-1": Contender(second_order(lead=lambda place: rest_of_delay(place) + 1)),
    "second-order-lead-k": Contender(second_order(lead=lambda place: place.stage)),
    "second-order-b95": Contender(second_order(), _SLOW),
    "second-order-b975": Contender(second_order(), {"betas": (0.975, 0.999)}),
    "second-order-b95-clip": Contender(second_order(clip=recipe_clip), _SLOW),
    "second-order-b95-t1": Contender(second_order(), _SLOW, careful=0.5),
    # what a pipeline's late stages gain by their smaller delays
    **{
        f"{name}-uniform": Contender(find_method(name), {"microbatches": 1}, uniform=True)
        for name in ("pipedream", "auto")
    },
    # arXiv 1912.12675, and asynchronous methods of other kinds before the same end
    "stale": Contender(_STALE),
    "hybrid": Contender(hybrid(_STALE), change=0.5),
    **{
        f"hybrid-{name}": Contender(hybrid(name), change=0.5)
        for name in ("vanilla", "pipedream", "spectrain", "auto")
    },
    # PipeMare's T3, and all three of its techniques
    "warm-up": Contender(hybrid("1f1b", "vanilla"), change=0.1),
    "pipemare-all": Contender(hybrid("1f1b", "pipemare"), careful=0.5, change=0.1),
    "pipedream-t1": Contender(find_method("pipedream"), careful=0.5),
    "pipemare": Contender(find_method("pipemare"), careful=0.5),
    "pipemare-t1": Contender(find_method("pipemare-t1"), careful=0.5),
    "linear-even-b95": Contender(_even("linear"), _SLOW),
}


#: What is compared where nothing else is asked for.
USUAL = (
    *("sync", "vanilla", "pipedream", "pipedream-2bw"),
    *("spectrain", "spectrain-stash", "auto"),
)


class Study(NamedTuple):
    """What a study trains, and how.

    Attributes:
        settings: fields of ``TrainSettings``; learning rates are sought from its ``lr`` on.
        updates: of a synchronous run.
        judges: seeds that a learning rate is judged by; 0: none is sought, all have the settings'.
        stages: numbers of stages, where none are asked for.
        microbatches: likewise.
        contenders: likewise.
    """

    settings: Mapping[str, Any]
    updates: int
    judges: int = 2
    stages: Sequence[int] = (4, 8)
    microbatches: Sequence[str] = ("1", "N")
    contenders: Sequence[str] = USUAL


_PIPELINED = ("vanilla", "pipedream", "spectrain", "spectrain-stash", "pipeoptim", "auto", "auto-4")
_HYBRID = ("sync", "stale", "hybrid", "vanilla", "pipedream", "spectrain", "auto", "hybrid-auto")
_IMAGES = {
    **{"data": "cifar10", "batch_size": 32, "weight_decay": 5e-4, "lr_schedule": "cosine"},
    **{"warmup": 30, "test_samples": 500},
}
_TEXT = {
    **{"data": "text", "batch_size": 16, "context": 32, "lr_schedule": "cosine", "warmup": 30},
    **{"depth": 6, "width": 64, "test_samples": 256},
}


def _paper(model: str, updates: int, *, normalized: bool = False, **settings: Any) -> Study:
    """A model of the paper's table: four stages, a microbatch, the same learning rate for all.

    Without BatchNorm data parallelism makes the updates of ``sync``, up to the order of sums.
    """
    usual = _TEXT if model in ("gpt", "lstm") else _IMAGES
    alike = ("sync", "data-parallel-4") if normalized else ("sync",)
    asked = {**usual, "model": model, **settings}
    return Study(asked, updates, 0, (4,), ("1",), (*alike, *_PIPELINED))


def _stale(depth: int) -> Study:
    """A model of the table of arXiv 1912.12675, with its learning rate, momentum and decay."""
    settings = {"model": "resnet", "depth": depth, "width": 4, "lr": 0.1, "weight_decay": 1e-4}
    asked = {**_IMAGES, **settings, "batch_size": 64, "test_samples": 1000}
    return Study(asked, 960, 0, (4,), ("1",), _HYBRID)


STUDIES = {
    # nanoGPT's small setting for characters, whose published validation loss is 1.88
    "nanogpt": Study(
        {
            **{"data": "text", "width": 128, "context": 64, "batch_size": 12, "test_samples": 512},
            **{"weight_decay": 0.1, "betas": (0.9, 0.99), "clip_norm": 1.0, "warmup": 100},
            **{"lr_schedule": "cosine", "lr": 0.001, "depth": 4},
        },
        2000,
    ),
    "text": Study(
        {
            **{"data": "text", "width": 32, "context": 32, "batch_size": 32},
            **{"weight_decay": 0.01, "warmup": 30, "lr": 0.004, "test_samples": 256},
        },
        400,
    ),
    # of 360 test images: with two judges synchronous training's rate was .05 instead of .003
    "digits": Study({"data": "digits", "batch_size": 16, "warmup": 0, "lr": 0.0125}, 360, judges=8),
    "cifar10": Study(
        {
            **{"data": "cifar10", "width": 8, "batch_size": 32, "weight_decay": 5e-4},
            **{"warmup": 30, "lr": 0.02, "train_samples": 3072, "test_samples": 1000},
        },
        192,
    ),
    # the paper's table in small; rates are the least power of two, times a start, with which the
    # loss of sync is within 1 % of its best: by one seed nearer ones cannot be told apart
    "paper-vgg16": _paper("vgg16", 400, normalized=True, width=8, lr=0.01),
    "paper-resnet": _paper("resnet", 300, normalized=True, width=8, lr=0.02),
    # in the paper by SGD as well: so narrow it does not leave chance with it in so few updates
    "paper-inception-v4": _paper(
        "inception-v4", 150, normalized=True, width=4, optimizer="adam", lr=0.004, weight_decay=0.0
    ),
    "paper-snn": _paper("snn", 1500, width=128, lr=0.01, weight_decay=0.0),
    "paper-transformer": _paper("gpt", 400, lr=0.004, weight_decay=0.01),
    # in small: the paper's have 56 to 362 layers, of width 16, in two stages
    "stale-resnet-8": _stale(8),
    "stale-resnet-20": _stale(20),
    "stale-resnet-44": _stale(44),
    "paper-lstm": _paper("lstm", 400, lr=0.25),
}
