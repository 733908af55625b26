"""Defines the contenders and workloads of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from spectrain_ext.method import Method, delay, find_method, hybrid
from spectrain_ext.method.formulas import RatesByDelay, rest_of_delay
from spectrain_ext.passes.averaging import Averaging, Elastic
from spectrain_ext.schedule import Law
from spectrain_ext.tools.commands.options import method_of

from .sparse import Sparse


class Contender(NamedTuple):
    """A method and its differences from the workload's settings."""

    method: Method
    changes: Mapping[str, Any] = {}  # changed fields of ``TrainSettings``
    # Fraction of a synchronous run over which learning rates rise from lr/D to lr on a stage with
    # delay D (PipeMare's T1); 0: the method's own.
    careful: float = 0.0
    # Fraction of a synchronous run's updates after which the method changes its phase; 0: its own.
    change: float = 0.0
    replicas: int = 1  # pipelines that are averaged, each with its own microbatches
    averaging: Averaging | None = None  # how; None: a single pipeline
    uniform: bool = False  # all N stages have a delay of N - 1 updates, like the first one
    clip: Literal["stage", "share", "all"] = "stage"  # what ``clip_norm`` is the largest norm of

    def over(self, updates: int) -> Method:
        """Return the method for a comparison with so many updates of a synchronous run."""
        method = self.method
        if self.careful:
            method = _in_the_end(method, rates=RatesByDelay(self.careful * updates))
        if self.change and method.then is not None:
            moment = round(self.change * updates)
            method = replace(method, then=replace(method.then, after=moment))
        return method


def _in_the_end(method: Method, **fields: Any) -> Method:
    if method.then is None:
        return replace(method, **fields)
    last = _in_the_end(method.then.method, **fields)
    return replace(method, then=replace(method.then, method=last))


def contender(name: str) -> Contender:
    """Return a contender by name: a method, ``module:NAME``, or one that only studies have."""
    return _EXTRA.get(name) or Contender(method_of(name))


def _even(law: Law) -> Method:
    """Return ``auto`` with another law: every stage predicts as far ahead as stage 0."""
    return Method(
        f"{law}-even",
        "",
        law=law,
        forward_horizon=lambda place: delay(place) + rest_of_delay(place),
        backward="stash",
    )


def _averaged(replicas: int, averaging: Averaging) -> Contender:
    parts = {"microbatches": replicas}
    return Contender(find_method("sync"), parts, replicas=replicas, averaging=averaging)


_CLIPS: tuple[Literal["share", "all"], ...] = ("share", "all")
_SYNC_AHEAD = Method(
    "sync-ahead",
    "",
    schedule="gpipe",
    law="second-order",
    forward_horizon=lambda place: 1,
    backward="stash",
)
_EXTRA = {
    # the effect of prediction alone, without any delay
    "sync-ahead": Contender(_SYNC_AHEAD),
    # XGrad, one update ahead, over several stages
    "sync-xgrad": Contender(replace(_SYNC_AHEAD, name="sync-xgrad", law="linear")),
    "sync-nadam": Contender(find_method("sync"), {"optimizer": "nadam"}),
    # arXiv 2505.01099
    "nesterov-async": Contender(
        find_method("pipedream"), {"optimizer": "nadam", "betas": (0.99, 0.999)}
    ),
    # bfloat16 moments: 4 bytes less each
    **{
        f"{name}-bfloat16": Contender(find_method(name), {"state_dtype": "bfloat16"})
        for name in ("sync", "auto")
    },
    # ten times AdamW's weight decay
    **{
        f"{name}-lion": Contender(find_method(name), {"optimizer": "lion", "weight_decay": 0.1})
        for name in ("sync", "auto", "pipedream")
    },
    "linear-even": Contender(_even("linear")),
    "difference-even": Contender(_even("difference")),
    # four replicas, whose BatchNorm statistics come from a quarter of the minibatch each
    "data-parallel-4": Contender(find_method("sync"), {"microbatches": 4}),
    "auto-4": Contender(find_method("auto"), {"microbatches": 4}),
    # AvgPipe: each replica has a part of the minibatch; a*r is .9, as in arXiv 1412.6651
    "elastic-2": _averaged(2, Elastic(0.9 / 2)),
    # AsyncMesh, arXiv 2601.22442, with the share, delay and first decay of its public code
    "sparse-2": _averaged(2, Sparse(share=0.05, delay=10, decay=0.5)),
    # arXiv 2602.03515
    **{
        f"{name}-rotation": Contender(find_method(name), {"optimizer": "basis-rotation"})
        for name in ("pipedream", "auto")
    },
    # clipped by the norm of all stages, which takes a flush, and by the stages' share of it
    **{
        f"{name}-clip-{how}": Contender(find_method(name), clip=how)
        for name in ("auto", "vanilla")
        for how in _CLIPS
    },
    # the effect of a pipeline's smaller delays in later stages
    **{
        f"{name}-uniform": Contender(find_method(name), {"microbatches": 1}, uniform=True)
        for name in ("pipedream", "auto")
    },
    # PipeMare's T1 and T2, and all three of its techniques
    "pipemare": Contender(find_method("pipemare"), careful=0.5),
    "pipemare-t1": Contender(find_method("pipemare-t1"), careful=0.5),
    "pipemare-all": Contender(hybrid("1f1b", "pipemare"), careful=0.5, change=0.1),
    # arXiv 1912.12675
    "hybrid-pipedream": Contender(hybrid("pipedream"), change=0.5),
}

#: The contenders by default.
USUAL = (
    *("sync", "vanilla", "pipedream", "pipedream-2bw"),
    *("spectrain", "spectrain-stash", "auto"),
)


class Study(NamedTuple):
    """The workload and defaults of a study."""

    settings: Mapping[str, Any]  # of ``TrainSettings``; the search of rates starts at its ``lr``
    updates: int  # of a synchronous run
    judges: int = 2  # seeds to judge a learning rate by; 0: no search, all use the settings'
    stages: Sequence[int] = (4, 8)
    microbatches: Sequence[str] = ("1", "N")
    contenders: Sequence[str] = USUAL


_PIPELINED = ("vanilla", "pipedream", "spectrain", "spectrain-stash", "pipeoptim", "auto", "auto-4")
_IMAGES = {
    **{"data": "cifar10", "batch_size": 32, "weight_decay": 5e-4, "lr_schedule": "cosine"},
    **{"warmup": 30, "test_samples": 500},
}
_TEXT = {
    **{"data": "text", "batch_size": 16, "context": 32, "lr_schedule": "cosine", "warmup": 30},
    **{"depth": 6, "width": 64, "test_samples": 256},
}


def _paper(model: str, updates: int, *, normalized: bool = False, **settings: Any) -> Study:
    """Return a study of the paper's table; without BatchNorm, data parallelism equals ``sync``."""
    usual = _TEXT if model in ("gpt", "lstm") else _IMAGES
    alike = ("sync", "data-parallel-4") if normalized else ("sync",)
    asked = {**usual, "model": model, **settings}
    return Study(asked, updates, 0, (4,), ("1",), (*alike, *_PIPELINED))


STUDIES = {
    # nanoGPT's small character-level setting; its published validation loss is 1.88
    "nanogpt": Study(
        {"data": "text", "model": "nanogpt", "lr_schedule": "cosine", "depth": 4, "lr": 0.002},
        2000,
        judges=1,
        stages=(6,),
        microbatches=("N",),
        contenders=(
            *("sync", "sync-nadam", "sync-xgrad", "auto", "spectrain", "error-feedback"),
            *("nesterov-async", "vanilla", "pipedream-2bw"),
        ),
    ),
    # about ten times its parameters
    "nanogpt-10x": Study(
        {
            **{"data": "text", "model": "nanogpt", "lr_schedule": "cosine", "depth": 4},
            **{"lr": 0.001, "width": 416},
        },
        1000,
        judges=1,
        stages=(6,),
        microbatches=("N",),
        contenders=("sync", "auto", "error-feedback", "vanilla"),
    ),
    "text": Study(
        {
            **{"data": "text", "width": 32, "context": 32, "batch_size": 32},
            **{"weight_decay": 0.01, "warmup": 30, "lr": 0.004, "test_samples": 256},
        },
        400,
    ),
    # 360 test images: with two judges the rate of synchronous training was .05 instead of .003
    "digits": Study({"data": "digits", "batch_size": 16, "warmup": 0, "lr": 0.0125}, 360, judges=8),
    # the paper's table, scaled down; rates are the smallest power of two (times a start) at which
    # the loss of sync is within 1 % of its best: one seed cannot distinguish closer ones
    "paper-vgg16": _paper("vgg16", 400, normalized=True, width=8, lr=0.01),
    "paper-resnet": _paper("resnet", 300, normalized=True, width=8, lr=0.02),
    # the paper uses SGD here too, with which so narrow a model stays at chance in these updates
    "paper-inception-v4": _paper(
        "inception-v4", 150, normalized=True, width=4, optimizer="adam", lr=0.004, weight_decay=0.0
    ),
    "paper-snn": _paper("snn", 1500, width=128, lr=0.01, weight_decay=0.0),
    "paper-transformer": _paper("gpt", 400, lr=0.004, weight_decay=0.01),
    "paper-lstm": _paper("lstm", 400, lr=0.25),
}
