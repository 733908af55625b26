"""Tests workloads: presets, models cut for every method, optimizers, learning rates, methods."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method, methods
from studies.builtin import build_stages, builtin
from studies.data.split import Split
from studies.optimizers import make_optimizer, make_scheduler
from studies.pipelines import build_pipeline, fitting
from studies.settings import (
    DATA_SETS,
    DEFAULT_METHODS,
    DEFAULT_MODEL,
    TrainSettings,
    choose_methods,
    microbatches_in,
    models_for,
    preset,
    settle,
    stages_of,
)
from studies.workload import mean_loss

SIZES = {"stages": 4, "width": 8, "lr": 0.1, "momentum": 0.75, "weight_decay": 0.01}
SETTINGS = replace(settle({"methods": ["sync"], **SIZES}), context=8, microbatches=1)


def settings_with(**changes: Any) -> TrainSettings:
    return replace(SETTINGS, **changes)


def split_of(data: str) -> Split:
    inputs, targets = {
        "digits": (torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64)),
        "cifar10": (torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)),
        "text": (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)),
    }[data]
    return Split("name", "features", inputs, targets, inputs, targets, classes=10)


PAIRS = [(data, model) for data in DATA_SETS for model in models_for(data)]


@pytest.mark.parametrize(("data", "model"), PAIRS)
def test_presets_make_a_model(data: str, model: str) -> None:
    if model == "inception-v4":
        pytest.importorskip("pytorchcv")
    assert DEFAULT_MODEL[data] in models_for(data)
    split = split_of(data)
    sizes = split.features, split.classes
    for quick in (False, True):
        found = preset(data, model, quick=quick)
        usual = {"gpt": "adamw", "speedrun": "muon", "inception-v4": "adam" if quick else "sgd"}
        assert found["optimizer"] == usual.get(model, "sgd")
        assert found["seeds"] == 1 if quick else found["seeds"] > 1
        assert ("context" in found) == (data == "text")
        settings = settings_with(
            **{"data": data, "model": model, "stages": 8, "context": found.get("context", 1)},
            # any width makes an MLP or a convolution
            **{"width": found["width"] if data == "text" else 4, "depth": found.get("depth")},
        )
        assert len(build_stages(settings, 8, 0, *sizes)) == 8


def test_more_than_eight_stages_make_the_mlp_deeper_for_every_method() -> None:
    deep, uncut = (build_stages(settings_with(stages=11), n, 0, 64, 10) for n in (11, 1))
    assert len(nn.Sequential(*deep).state_dict()) == len(uncut[0].state_dict())


def test_mean_loss_is_per_target() -> None:
    logits, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    each = [-logits[b, t].log_softmax(0)[targets[b, t]] for b in range(3) for t in range(5)]
    torch.testing.assert_close(mean_loss(logits, targets), torch.stack(each).mean())
    torch.testing.assert_close(
        mean_loss(logits[:, 0], targets[:, 0]), torch.stack(each[::5]).mean()
    )


# Optimizers and learning rates


def test_settings_reach_the_optimizer() -> None:
    kinds = {"adam": st.optim.Adam, "adamw": st.optim.AdamW, "nadam": st.optim.NAdam}
    wanted = {"lr": 0.1, "weight_decay": 0.01}
    for name, kind in {"sgd": st.optim.SGD, **kinds}.items():
        settings = settings_with(optimizer=name, nesterov=True)
        made = make_optimizer(settings, find_method("vanilla"), [nn.Parameter(torch.zeros(2))])
        assert type(made) is kind
        more = {"momentum": 0.75, "nesterov": True} if name == "sgd" else {}
        expected = {**wanted, **more}
        assert {key: made.param_groups[0][key] for key in expected} == expected


@pytest.mark.parametrize(("schedule", "warmup"), [("constant", 4), ("cosine", 0), ("cosine", 4)])
def test_the_learning_rate_rises_then_stays_or_falls(schedule: str, warmup: int) -> None:
    assert make_scheduler(SETTINGS, updates=5) is None
    make = make_scheduler(settings_with(lr_schedule=schedule, warmup=warmup), updates=20)
    assert make is not None
    (factor,) = make(st.optim.SGD([torch.zeros(1)], 0.1)).lr_lambdas
    rates = [factor(update) for update in range(21)]
    assert rates[:warmup] == pytest.approx([(n + 1) / (warmup + 1) for n in range(warmup)])
    falling = [0.5 + 0.5 * math.cos(math.pi * n / (20 - warmup)) for n in range(21 - warmup)]
    stays = schedule == "constant"
    assert rates[warmup:] == pytest.approx([1.0] * len(falling) if stays else falling)


# Methods


def test_a_comparison_is_settled_without_a_command_line() -> None:
    settings = settle({"seeds": 2, "methods": ["sync"], "lr": 0.3}, quick=True)
    assert (settings.seeds, settings.methods, settings.lr) == ((0, 1), ("sync",), 0.3)
    assert (settings.model, settings.stages, settings.epochs) == ("residual-mlp", 8, 1)
    assert settle({}).methods == DEFAULT_METHODS
    assert choose_methods(["vanilla", "sync", "vanilla"]) == ("vanilla", "sync")
    assert choose_methods(["sync", "all"]) == st.methods()
    images = {"data": "cifar10", "data_dir": Path(), "model": "inception-v4"}
    assert settle(images).width == 32


def test_stages_and_microbatches_that_methods_have() -> None:
    settings = settings_with(microbatches="auto")
    usual = {name: microbatches_in(find_method(name), settings) for name in methods()}
    assert {name for name, parts in usual.items() if parts == 4} == {
        *("auto", "gpipe", "1f1b", "pipedream-2bw", "error-feedback", "zb-h1", "zb-h1-async"),
        *("interleaved", "interleaved-async"),
    }
    assert {name for name, parts in usual.items() if parts == 2} == {"wpipe"}
    assert microbatches_in(find_method("vanilla"), settings_with(microbatches=3)) == 3
    # of the uncut model on one device
    assert [stages_of(find_method(name), SETTINGS) for name in ("xgrad", "spectrain")] == [1, 4]
    kept, left_out = fitting(settings_with(methods=("xgrad", "vanilla")), leave_out=False)
    assert (kept.methods, left_out) == (("xgrad", "vanilla"), {})


def test_settings_reach_the_pipeline() -> None:
    """Observed from outside: a maximum norm of almost 0 keeps the weights constant."""
    moved = []
    for clip_norm in (None, 1e-12):
        settings = settings_with(clip_norm=clip_norm, weight_decay=0.0, microbatches=2)
        layer, method = nn.Linear(3, 5), find_method("vanilla")
        before = layer.weight.detach().clone()
        workload = builtin(split_of("digits"), settings, method, 1, 0)
        pipe = build_pipeline(settings, method, workload, [layer])
        list(pipe.run([(torch.randn(4, 3), torch.tensor([0, 1, 2, 3]))]))
        pipe.release()
        moved.append((layer.weight.detach() - before).abs().max().item())
    assert moved[0] > 1e-3
    assert moved[1] < 1e-9
