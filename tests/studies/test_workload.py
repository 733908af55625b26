"""Tests workloads: models cut for every method, optimizers, learning rates, methods."""

import dataclasses
import math
from importlib.util import find_spec
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
from studies.options import OptionError
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

SETTINGS = TrainSettings(
    data="digits",
    data_dir=None,
    model="residual-mlp",
    methods=DEFAULT_METHODS,
    seeds=(0,),
    stages=4,
    devices=("cpu",) * 4,
    epochs=1,
    batch_size=8,
    microbatches=1,
    clip_norm=None,
    width=8,
    depth=None,
    context=8,
    train_samples=None,
    test_samples=None,
    augment=False,
    optimizer="sgd",
    lr=0.1,
    momentum=0.75,
    weight_decay=0.01,
    nesterov=False,
    lr_schedule="constant",
    warmup=0,
    threads=1,
)


def _with(**changes: Any) -> TrainSettings:
    return dataclasses.replace(SETTINGS, **changes)


def _split(kind: Any) -> Split:
    inputs = {
        "features": torch.zeros(2, 64),
        "images": torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
        "text": torch.zeros(2, 8, dtype=torch.int64),
    }[kind]
    targets = inputs if kind == "text" else torch.zeros(2, dtype=torch.int64)
    return Split("name", kind, inputs, targets, inputs, targets, classes=10)


def _sizes(data: str) -> tuple[int, int]:
    split = _split(KINDS[data])
    return split.features, split.classes


KINDS = {"digits": "features", "cifar10": "images", "text": "text"}
_LIBRARY = pytest.mark.skipif(find_spec("pytorchcv") is None, reason="needs the extra 'inception'")
PAIRS = [
    pytest.param(data, model, id=f"{data}-{model}", marks=[_LIBRARY] * (model == "inception-v4"))
    for data in DATA_SETS
    for model in models_for(data)
]


# Presets


@pytest.mark.parametrize(("data", "model"), PAIRS)
def test_every_pair_has_sizes_that_make_a_model(data: str, model: str) -> None:
    for quick in (False, True):
        found = preset(data, model, quick=quick)
        settings = _with(
            **{"data": data, "model": model, "stages": 8, "context": found.get("context", 1)},
            # any width makes an MLP or a convolution
            **{"width": found["width"] if data == "text" else 4, "depth": found.get("depth")},
        )
        stages = build_stages(settings, 8, 0, *_sizes(data))
        assert len(stages) == 8
        usual = {"gpt": "adamw", "speedrun": "muon", "inception-v4": "adam" if quick else "sgd"}
        assert found["optimizer"] == usual.get(model, "sgd")
        assert found["seeds"] == 1 if quick else found["seeds"] > 1
        assert ("context" in found) == (data == "text")
    assert DEFAULT_MODEL[data] in models_for(data)


# Models


@pytest.mark.parametrize(("data", "model"), PAIRS)
def test_the_weights_do_not_depend_on_the_cut(data: str, model: str) -> None:
    settings = _with(data=data, model=model, stages=5)

    def weights(stages: int) -> torch.Tensor:
        cut = build_stages(settings, stages, 3, *_sizes(data))
        assert len(cut) == stages
        return nn.utils.parameters_to_vector(nn.Sequential(*cut).parameters()).detach()

    whole = weights(1)
    assert torch.equal(weights(5), whole)
    assert torch.equal(weights(2), whole)
    split = _split(KINDS[data])
    outputs = nn.Sequential(*build_stages(settings, 2, 0, *_sizes(data))).eval()(
        split.train_inputs if data == "text" else split.train_inputs.float()
    )
    assert outputs.shape == (*split.train_targets.shape, 10)
    assert mean_loss(outputs, split.train_targets).dim() == 0


def test_more_than_eight_stages_make_the_mlp_deeper_for_every_method() -> None:
    settings = _with(stages=11)
    deep = build_stages(settings, 11, 0, *_sizes("digits"))
    uncut = build_stages(settings, 1, 0, *_sizes("digits"))
    assert len(list(nn.Sequential(*uncut).parameters())) == len(
        list(nn.Sequential(*deep).parameters())
    )


def test_mean_loss_is_per_target() -> None:
    logits, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    expected = (
        -sum(logits[b, t].log_softmax(0)[targets[b, t]] for b in range(3) for t in range(5)) / 15
    )
    torch.testing.assert_close(mean_loss(logits, targets), expected)
    torch.testing.assert_close(
        mean_loss(logits[:, 0], targets[:, 0]),
        nn.functional.cross_entropy(logits[:, 0], targets[:, 0]),
    )


# Optimizers and learning rates


def test_settings_reach_the_optimizer() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    sgd = make_optimizer(_with(nesterov=True), find_method("vanilla"), parameters)
    assert isinstance(sgd, st.optim.SGD)
    wanted = {"lr": 0.1, "momentum": 0.75, "weight_decay": 0.01, "nesterov": True}
    assert {key: sgd.param_groups[0][key] for key in wanted} == wanted
    kinds = {"adam": st.optim.Adam, "adamw": st.optim.AdamW, "nadam": st.optim.NAdam}
    for name, kind in kinds.items():
        adam = make_optimizer(_with(optimizer=name), find_method("vanilla"), parameters)
        assert type(adam) is kind
        assert adam.param_groups[0]["lr"] == 0.1
        assert adam.param_groups[0]["weight_decay"] == 0.01


def test_averaged_momentum_makes_the_updates_of_summed_momentum() -> None:
    paths = []
    for name in ("spectrain", "spectrain-smoothed"):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = make_optimizer(_with(), find_method(name), [weight])
        assert optimizer.param_groups[0].get("smoothed", False) == (name == "spectrain-smoothed")
        for _ in range(5):
            weight.grad = torch.randn(3, dtype=torch.float64)
            optimizer.step()
        paths.append(weight.detach())
    torch.testing.assert_close(paths[0], paths[1])


@pytest.mark.parametrize(("schedule", "warmup"), [("constant", 4), ("cosine", 0), ("cosine", 4)])
def test_the_learning_rate_rises_then_stays_or_falls(schedule: str, warmup: int) -> None:
    settings = _with(lr_schedule=schedule, warmup=warmup)
    make = make_scheduler(settings, updates=20)
    assert make is not None
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer(settings, find_method("vanilla"), [parameter])
    scheduler = make(optimizer)
    rates = []
    for _ in range(21):
        rates.append(optimizer.param_groups[0]["lr"] / settings.lr)
        parameter.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    assert rates[:warmup] == pytest.approx([(n + 1) / (warmup + 1) for n in range(warmup)])
    assert rates[warmup] == pytest.approx(1.0)
    if schedule == "constant":
        assert rates[warmup:] == pytest.approx([1.0] * len(rates[warmup:]))
    else:
        middle = (20 + warmup) // 2
        assert rates[middle] == pytest.approx(0.5)
        assert rates[middle - 3] == pytest.approx(0.5 + 0.5 * math.sin(math.pi * 3 / (20 - warmup)))
        assert rates[20] == pytest.approx(0.0, abs=1e-9)
        assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_a_constant_rate_needs_no_scheduler() -> None:
    assert make_scheduler(SETTINGS, updates=5) is None


# Methods


def test_methods_are_named_once_in_the_order_given() -> None:
    assert choose_methods(["vanilla", "sync", "vanilla"]) == ("vanilla", "sync")
    assert choose_methods(["sync", "all"]) == st.methods()
    with pytest.raises(OptionError, match=r"there is no 'sink'; there are .*spectrain"):
        choose_methods(["sync", "sink"])


def test_a_comparison_is_settled_without_a_command_line() -> None:
    settings = settle({"seeds": 2, "methods": ["sync"], "lr": 0.3}, quick=True)
    assert (settings.seeds, settings.methods, settings.lr) == ((0, 1), ("sync",), 0.3)
    assert (settings.model, settings.stages, settings.epochs) == ("residual-mlp", 8, 1)
    assert settle({}).methods == DEFAULT_METHODS
    with pytest.raises(OptionError, match="varies images, and --data digits has none") as caught:
        settle({"augment": True})
    assert caught.value.option == "augment"
    images = {"data": "cifar10", "data_dir": Path(), "model": "inception-v4"}
    assert settle(images).width == 32
    with pytest.raises(OptionError, match="has the one that it has") as caught:
        settle({**images, "depth": 3})
    assert caught.value.option == "depth"


def test_microbatches_that_methods_have() -> None:
    settings = _with(microbatches="auto")
    usual = {name: microbatches_in(find_method(name), settings) for name in methods()}
    assert {name for name, parts in usual.items() if parts == 4} == {
        *("auto", "gpipe", "1f1b", "pipedream-2bw", "error-feedback", "zb-h1", "zb-h1-async"),
        *("interleaved", "interleaved-async"),
    }
    assert {name for name, parts in usual.items() if parts == 2} == {"wpipe"}
    assert set(usual.values()) == {1, 2, 4}
    assert microbatches_in(find_method("vanilla"), _with(microbatches=3)) == 3


def test_what_does_not_fit_is_named_or_left_out() -> None:
    settings = _with(methods=("sync", "pipedream-2bw", "spectrain"), momentum=0.0, microbatches=1)
    kept, left_out = fitting(settings, leave_out=True)
    assert kept.methods == ("sync",)
    assert list(left_out) == ["pipedream-2bw", "spectrain"]
    assert "microbatches" in left_out["pipedream-2bw"]
    assert "momentum" in left_out["spectrain"]
    with pytest.raises(ValueError, match=r"^method pipedream-2bw: .*microbatches"):
        fitting(settings, leave_out=False)
    with pytest.raises(ValueError, match=r"^method spectrain: .*momentum"):
        fitting(_with(methods=("spectrain",), momentum=0.0), leave_out=True)


def test_a_method_for_one_device_trains_the_uncut_model() -> None:
    assert stages_of(find_method("xgrad"), SETTINGS) == 1
    assert stages_of(find_method("spectrain"), SETTINGS) == 4
    kept, left_out = fitting(_with(methods=("xgrad", "vanilla")), leave_out=False)
    assert kept.methods == ("xgrad", "vanilla")
    assert not left_out


def test_settings_reach_the_pipeline() -> None:
    """Observed from outside: a maximum norm of almost 0 keeps the weights constant."""
    moved = []
    for clip_norm in (None, 1e-12):
        torch.manual_seed(0)
        settings = _with(clip_norm=clip_norm, weight_decay=0.0, microbatches=2)
        layer = nn.Linear(3, 5)
        before = layer.weight.detach().clone()
        method = find_method("vanilla")
        workload = builtin(_split("features"), settings, method, 1, 0)
        pipe = build_pipeline(settings, method, workload, [layer])
        list(pipe.run([(torch.randn(4, 3), torch.tensor([0, 1, 2, 3]))]))
        pipe.release()
        moved.append((layer.weight.detach() - before).abs().max().item())
    assert moved[0] > 1e-3
    assert moved[1] < 1e-9
