"""Tests workloads and methods, built in and one's own: settled, trained, studied and resumed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from helpers.cli_programs import called, spectrain, text_of
from helpers.study_data import document_in, losses_in
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method, methods
from spectrain_ext.partitioning import BlockProfile, Profile
from spectrain_ext.tools.planning import Layers, write_layers
from studies import workload
from studies.__main__ import main as studies
from studies.builtin import build_stages, builtin
from studies.contenders import STUDIES, contender
from studies.data.split import Split
from studies.optimizers import make_optimizer, make_scheduler
from studies.pipelines import build_pipeline, fitting
from studies.settings import (
    DATA_SETS,
    DEFAULT_METHODS,
    DEFAULT_MODEL,
    TrainSettings,
    choose_methods,
    method_of,
    microbatches_in,
    models_for,
    preset,
    settle,
    stages_of,
)
from studies.study import cells_of, run_file
from studies.workload import epochs_of, mean_loss, own, stages_in

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

FAST = ("--batch-size", 256, "--epochs", 1, "--seeds", 1, "--stages", 2, "--width", 8)
MODULE = """
from dataclasses import replace
import torch
from torch import nn
import spectrain_ext as st
from studies import Workload

ahead = 1
mine = st.Method(
    "mine", "as far as asked", forward_horizon=lambda place: ahead * (place.window - 1),
    backward="stash",
)

def made():
    return replace(mine, name="made")

def late():
    raise RuntimeError("not today")

fails = replace(mine, name="fails", correction=lambda place: 1 // 0)
taken = st.spectrain()
again = replace(mine)
path = replace(mine, name="../mine")
number = 3

calls = []

def line(seed, stages, method, epochs, lr=0.1, width=4, unknown="default"):
    calls.append((seed, stages, method, epochs, lr, width, unknown))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=draw)
    y = x.sum(1, keepdim=True)
    return Workload(
        model=nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)),
        optimizer=lambda parameters: st.optim.SGD(parameters, lr=lr, momentum=0.5),
        loss=nn.functional.mse_loss,
        train=list(zip(x.split(4), y.split(4))),
        test=[(x, y)],
        judged="loss",
    )

def no_rate():
    return line(0, 1, "sync", 1)

def needs(wheel):
    pass

def wrong():
    return 3

def uncut():
    return replace(line(0, 1, "sync", 1), model=nn.Linear(3, 1))

def broken(lr=0.1):
    raise RuntimeError("not today")
"""


def forget(name: str) -> None:
    """Import the module again where it is asked for."""
    sys.modules.pop(name, None)
    for cached in (method_of, workload.parameters_of, workload.source_of_workload):
        cached.cache_clear()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module into the working directory; return its name, which differs between tests."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    forget(name)


def run(*arguments: object) -> Result:
    command = studies if arguments[0] in ("train", "study", "slow-links") else spectrain
    return called(command, *arguments)


def succeeded(*arguments: object) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return text_of(done)


# Methods


def test_a_method_trains_resumes_and_is_named(module: str) -> None:
    asked = ("train", *FAST, "--out", "out", "-m", f"sync,{module}:mine,spectrain-stash")
    succeeded(*asked, "-m", f"{module}:made")
    losses = losses_in(Path("out"))
    assert list(losses) == ["sync", "mine", "spectrain-stash", "made"]
    # with one microbatch the delay is window - 1: the same row
    assert losses["mine"] == losses["made"] == losses["spectrain-stash"] != losses["sync"]
    assert document_in(Path("out"))["settings"]["methods"][1] == f"{module}:mine"
    assert "3 of 3 runs were finished before" in succeeded(*asked)
    # another file is another method
    Path(f"{module}.py").write_text(MODULE.replace("ahead = 1", "ahead = 3"))
    forget(module)
    assert "2 of 3 runs were finished before" in succeeded(*asked)
    assert losses_in(Path("out"))["mine"] != losses["mine"]


def test_a_timeline_of_a_method_and_its_place_among_all(module: str) -> None:
    said = succeeded("timeline", "-m", f"{module}:mine", "-o", "t.json", "--minibatches", "3")
    assert said.startswith("mine, 4 stages: ")
    assert choose_methods([f"{module}:mine", "all"]) == (*methods(), f"{module}:mine")
    assert method_of("auto") is find_method("auto")


def test_a_correction_of_ones_own_that_fails(module: str) -> None:
    blocks = Profile(tuple(BlockProfile(0.01, 1000, 4000, 2000) for _ in range(4)))
    write_layers("profile.json", Layers((8, 8), (blocks, blocks)))
    for command in (
        ("train", *FAST, "--out", "out"),
        ("timeline", "--stages", 2, "-o", "t.json"),
        ("plan", "--profile", "profile.json", "--devices", 2, "--batch", 8),
    ):
        done = run(*command, "-m", f"{module}:fails")
        assert isinstance(done.exception, SystemExit)
        assert f"ZeroDivisionError: integer division or modulo by zero ({module}.py, line " in (
            text_of(done)
        )


def test_a_study_finds_a_method_by_its_module(module: str) -> None:
    (cell,) = cells_of(STUDIES["digits"], None, [2], ["1"], [f"{module}:mine"])
    assert contender(cell.contender).method.name == "mine"
    path = run_file(Path(), cell, 0.1, 0).path
    assert ":" not in path.name
    Path(f"{module}.py").write_text(f"{MODULE}\n# changed\n")
    assert run_file(Path(), cell, 0.1, 0).path != path


# Workloads

EXAMPLE = "examples.own_workload:digits_mlp"


def test_the_example_is_studied_and_prints_the_table(tmp_path: Path) -> None:
    asked = ("--stages", 2, "--microbatches", 1, "-m", "vanilla", "--seeds", 2, "--updates", 8)
    said = succeeded("study", "--workload", EXAMPLE, *asked, "--out", tmp_path)
    assert "gap %" in said and "lr" in said
    document = json.loads((tmp_path / "frontier.json").read_text())
    assert [row["contender"] for row in document["rows"]] == ["sync", "vanilla"]
    assert all(len(row["losses"]) == 2 for row in document["rows"])
    assert document["updates"] == 8
    assert document["command"].startswith(f"python -m studies study --workload {EXAMPLE}")
    # the search starts at the function's default, in factors of two
    rates = [row["lr"] / 0.05 for row in document["rows"]]
    assert all(rate in {2.0**power for power in range(-8, 9)} for rate in rates)


def test_the_function_is_called_with_what_it_has_parameters_for(module: str) -> None:
    asked = {"workload": f"{module}:line", "stages": 2, "methods": ["sync"]}
    settings = settle({**asked, "width": 6, "lr": 0.25, "epochs": 3})
    made = own(settings, find_method("spectrain"), 2, 7)
    assert sys.modules[module].calls[-1] == (7, 2, "spectrain", 3, 0.25, 6, "default")
    assert [len(list(stage.parameters())) for stage in stages_in(made, 2)] == [2, 2]
    assert len(list(epochs_of(made.train, 3))) == 3 * 6
    assert len(made.about["workload_sha256"]) == 64
    # the weights are the seed's, and the random state stays
    state = torch.random.get_rng_state()
    first, again, other = (
        own(settings, find_method("sync"), stages, seed).model[0].weight
        for stages, seed in ((1, 5), (2, 5), (2, 6))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_has_no_classes_is_judged_by_its_loss(module: str) -> None:
    asked = ("--stages", 2, "-m", "sync,vanilla", "--seeds", 2, "--epochs", 12, "--out", "out")
    succeeded("train", "--workload", f"{module}:line", *asked)
    document = document_in(Path("out"))
    assert [method["test_accuracy"] for method in document["methods"]] == [None, None]
    assert all(method["test_loss"] < 1.0 for method in document["methods"])
    assert document["settings"]["workload"] == f"{module}:line"


# Errors

NO_METHODS = [
    ("{}_none:mine", "there is no module '{}_none' in "),
    ("{}:nothing", "module '{}' has no 'nothing'"),
    (":mine", "module '' cannot be imported: ValueError"),
    ("{}:number", "'{}:number' is of type int, expected a spectrain_ext.Method"),
    ("{}:late", "'{}:late', called, failed: RuntimeError: not today ({}.py, line "),
    ("{}:taken", "has the name 'spectrain', which is a method of spectrain_ext"),
    ("{}:path", "has the name '../mine', which is to be the name of files"),
    ("{}_bad:mine", "({}_bad.py, line 3)"),
]


@pytest.mark.parametrize(
    ("asked", "option", "expected"),
    [
        *((f"train -m {name}", "method", expected) for name, expected in NO_METHODS),
        *((f"timeline -m {name}", None, expected) for name, expected in NO_METHODS),
        ("train -m {}:mine,{}:again", "method", "are both called 'mine'; expected another name"),
        ("train --workload no_function", "workload", "expected module:function"),
        ("train --workload {}_none:line", "workload", "there is no module"),
        ("train --workload {}:nothing", "workload", "has no 'nothing'"),
        ("train --workload {}:number", "workload", "is of type int, expected a function"),
        ("train --workload {}:wrong", "workload", "returned a int, expected a studies."),
        ("train --workload {}:uncut", "workload", "returned a model of type Linear"),
        ("train --workload {}:needs", "workload", "a parameter 'wheel' without a default"),
        ("train --workload {}:no_rate --lr 1", "lr", "has no parameter 'lr'"),
        ("train --workload {}:line --depth 3", "depth", "has no parameter 'depth'"),
        ("train --workload {}:line --data digits", "data", "of the built-in"),
        ("train --workload {}:line --model gpt", "model", "of the built-in"),
        ("study --workload {}:no_rate", "workload", "expected a parameter 'lr' with a"),
        ("study --workload {}:line --data text", "data", "of the built-in"),
        ("study --epochs 3", "epochs", "is of --workload"),
        ("study --workload {}:line --lr-schedule cosine", "lr-schedule", "makes its own"),
        ("study --workload {}:line --epochs 1 --updates 9", "updates", "not both"),
        ("study --data paper-snn --optimizer sgd", "optimizer", "seek learning rates"),
        ("study --length 0.5", "length", "not in the range"),
        ("study -m sc --optimizer soap", None, "method 'sc' is defined for sgd"),
        ("slow-links", "data-dir", "--data text is read from files"),
        ("slow-links --data-dir nowhere", None, "nowhere: no such file"),
        ("study --workload {}:line -m nesterov-async", "method", "the optimizer"),
        *(
            (f"{command} --workload {asked}", None, expected)
            for command in ("train", "study")
            for asked, expected in (
                ("{}:line --stages 4", "stages must be between 1 and the 3 layers"),
                ("{}:broken", "RuntimeError: not today ({}.py, line "),
            )
        ),
    ],
)
def test_what_cannot_be_trained_or_studied_is_told_first(
    module: str, asked: str, option: str | None, expected: str
) -> None:
    Path(f"{module}_bad.py").write_text("import torch\n\ntorch.nothing\n")
    done = run(*asked.format(module, module).split(), "--out", "out.svg")
    assert done.exit_code == (1 if option is None else 2), done.output
    assert isinstance(done.exception, SystemExit)
    if option is not None:
        assert f"Invalid value for '--{option}': " in text_of(done)
    assert expected.format(module, module) in text_of(done)
    assert not Path("out.svg").exists()


def test_the_functions_options_are_those_of_the_command_and_a_test_has_targets() -> None:
    known = {str(option.name) for option in studies.commands["train"].params}
    assert set(workload.OFFERED) <= known
    with pytest.raises(ValueError, match="test: expected minibatches with targets, got none"):
        workload.tested(torch.nn.Linear(1, 1), [])


# Built-in workloads

SIZES = {"stages": 4, "width": 8, "lr": 0.1, "momentum": 0.75, "weight_decay": 0.01}
SETTINGS = replace(settle({"methods": ["sync"], **SIZES}), context=8, microbatches=1)


def settings_with(**changes: Any) -> TrainSettings:
    return replace(SETTINGS, **changes)


PAIRS = [(data, model) for data in DATA_SETS for model in models_for(data)]


@pytest.mark.parametrize(("data", "model"), PAIRS)
def test_presets_make_a_model(data: str, model: str) -> None:
    if model == "inception-v4":
        pytest.importorskip("pytorchcv")
    assert DEFAULT_MODEL[data] in models_for(data)
    sizes = {"digits": 64, "cifar10": 3 * 32 * 32, "text": 8}[data], 10
    for quick in (False, True):
        found = preset(data, model, quick=quick)
        usual = {"gpt": "adamw", "nanogpt": "adamw", "speedrun": "muon"}
        usual["inception-v4"] = "adam" if quick else "sgd"
        assert found["optimizer"] == usual.get(model, "sgd")
        assert found["seeds"] == 1 if quick else found["seeds"] > 1
        assert ("context" in found) == (data == "text")
        stages = 6 if model == "nanogpt" else 8  # it has six layers
        settings = settings_with(
            **{"data": data, "model": model, "stages": stages, "context": found.get("context", 1)},
            # any width makes an MLP or a convolution
            **{"width": found["width"] if data == "text" else 4, "depth": found.get("depth")},
        )
        assert len(build_stages(settings, stages, 0, *sizes)) == stages


def test_nanogpts_setting_is_the_published_one() -> None:
    asked = {"data": "text", "data_dir": Path(), "stages": 6, "model": "nanogpt"}
    settings = settle({**asked, "methods": ["sync"]})
    shape = 40, settings.context
    tokens = [torch.randint(65, (n, settings.context)) for n in (40, 40, 9, 9)]
    found = builtin(Split("t", "text", *tokens, 65), settings, find_method("sync"), 6, 0)
    stages = nn.ModuleList(found.model)
    sizes = {name: p.numel() for name, p in stages.named_parameters()}
    assert tokens[0].shape == shape and len(stages) == 6
    # four blocks, the norms, the tied embedding and the positions; its README says 0.80 million
    assert sum(sizes.values()) == 4 * 12 * 128**2 + 9 * 128 + 65 * 128 + 64 * 128
    assert not any("bias" in name for name in sizes)
    for muon in (False, True):
        chosen = replace(settings, optimizer="muon") if muon else settings
        made = builtin(Split("t", "text", *tokens, 65), chosen, find_method("sync"), 6, 0)
        groups = made.optimizer([*nn.ModuleList(made.model).parameters()]).param_groups
        for group in groups:
            assert group["weight_decay"] == (0.1 if group["params"][0].dim() > 1 else 0.0)
            assert muon or group["betas"] == (0.9, 0.99)
        assert sum(p.numel() for group in groups for p in group["params"]) == sum(sizes.values())
        for stage in made.model:  # the first and the last have no hidden matrices
            made.optimizer([*stage.parameters()])
    scheduler = make_scheduler(settings, 2000)
    assert scheduler is not None
    (factor,) = scheduler(st.optim.SGD([torch.zeros(1)], 0.1)).lr_lambdas
    assert [factor(u) for u in (0, 100, 1050, 2000)] == pytest.approx([1 / 101, 1.0, 0.55, 0.1])


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
    x, y, moved = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64), []
    split = Split("name", "features", x, y, x, y, classes=10)
    for clip_norm in (None, 1e-12):
        settings = settings_with(clip_norm=clip_norm, weight_decay=0.0, microbatches=2)
        layer, method = nn.Linear(3, 5), find_method("vanilla")
        before = layer.weight.detach().clone()
        workload = builtin(split, settings, method, 1, 0)
        pipe = build_pipeline(settings, method, workload, [layer])
        list(pipe.run([(torch.randn(4, 3), torch.tensor([0, 1, 2, 3]))]))
        pipe.release()
        moved.append((layer.weight.detach() - before).abs().max().item())
    assert moved[0] > 1e-3
    assert moved[1] < 1e-9
