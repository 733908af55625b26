"""Tests plans that are applied: every form of model is cut where its plan says; other files."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from functools import cache

import pytest
import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext.tools.planning import measure_layers, plan, write_plan


class Net(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 6)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))

    def forward(self, x):
        first = x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x + first)


def linears(count=3):
    return [nn.Linear(6, 6) for _ in range(count)]


def sequence():
    named = OrderedDict((f"layer{k}", linear) for k, linear in enumerate(linears(5)))
    return nn.Sequential(named), torch.randn(8, 6)


def traced():
    return Net(), torch.randn(8, 6)


def blocks():
    return [*linears(4), nn.Tanh()], torch.randn(8, 6)


def decoder():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)
    return transformers.LlamaForCausalLM(config), torch.randint(32, (8, 5))


def output_of(module, value):
    with torch.no_grad():
        output = module(value)
    return getattr(output, "logits", output)


@pytest.mark.parametrize("form", [sequence, blocks, traced, decoder])
def test_a_model_is_cut_where_its_plan_says_without_being_measured(form, tmp_path, monkeypatch):
    model, example = form()
    found = plan(
        measure_layers(model, example, repeats=1),
        *(3,),
        **{"link": ["nvlink", "pcie3"], "batch": 12, "replicas": 1, "methods": ["auto", "gpipe"]},
        **{"speed": (1, 0.5, 1), "memory": (1e9, 2e9, 1e9)},
    )
    path = tmp_path / "plan.json"
    write_plan(path, found)
    monkeypatch.setattr(time, "perf_counter", None)
    needed = {"example_input": example} if form is traced else {}
    whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    expected = output_of(whole, example)
    # from each form of a plan; the others are traced, which takes a second each time
    ways = (path, str(path), found, found.document()) if form is sequence else (path,)
    for way in ways:
        parts = st.partition(model, plan=way, **needed)
        assert parts.cut.ends == found.soonest.ends
        assert parts.settings == found.soonest.settings
        value = example
        for stage in parts:
            value = output_of(stage, value)
        assert torch.equal(value, expected)
        for stage, point in zip(parts.stages[1:], found.soonest.split_points, strict=True):
            names = [stage.cut.full_name(name) for name, _ in stage.named_parameters()]
            assert point == "4" or any(name.startswith(f"{point}.") for name in names)
    if form is sequence:
        assert st.partition(model, 3, plan=found).cut == parts.cut
        said = "n_stages: expected 3, as the plan has, or none, got 2"
        with pytest.raises(ValueError, match=said):
            st.partition(model, 2, plan=found)
    pipe = st.Pipeline(
        *(parts, lambda p: st.optim.SGD(p, lr=0.1), lambda output, _: output[0].sum()),
        **parts.settings,
    )
    assert pipe.method.name == found.soonest.method


@cache
def document_of(make):
    layers = measure_layers(make(), torch.randn(8, 6), repeats=1)
    found = plan(layers, 2, link="nvlink", batch=8, replicas=1, methods=["auto"])
    return found.document()


def three():
    return nn.Sequential(*linears())


def apart():
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm)


def short():
    return nn.Sequential(OrderedDict(stem=nn.Linear(6, 8)))


X = {"example_input": torch.ones(8, 6)}


@pytest.mark.parametrize(
    ("planned", "changes", "model", "more", "why"),
    [
        (Net, {}, lambda: nn.Sequential(*linears(2)), {}, "at block 0 its 'Net' of 5 blocks has "),
        (Net, {}, short, {}, "at block 1 .* 'blocks.0', .* 1 has no"),
        (Net, {}, lambda: Net(4), X, "at block 4 .* has 'head', this one of 6 has 'blocks.3'"),
        (Net, {}, Net, {**X, "split_points": ["head"]}, "split_points: the plan has its own"),
        (apart, {"ends": [2, 4]}, apart, {}, "plan: it separates .*which stages 0 and 1 use"),
    ],
)
def test_a_plan_of_another_model_is_an_error_that_names_the_first_difference(
    planned, changes, model, more, why
):
    with pytest.raises(ValueError, match=why):
        st.partition(model(), plan={**document_of(planned), **changes}, **more)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"spectrain_plan": 2}, "spectrain_plan: expected format 1, got 2"),
        ({"blocks": [3]}, r"blocks\[0\]: "),
        ({"blocks": [{"seconds": 1, "name": 3}]}, "blocks: expected some, with names"),
        ({"blocks": [{"seconds": 10**400}]}, r"blocks\[0\]: seconds: expected a number"),
        ({"blocks": None}, "not iterable"),
        ({"ends": [True, 3]}, "ends: expected ascending numbers, the last of them 3"),
        ({"ends": [1, 2]}, "ends: expected ascending numbers, the last of them 3"),
        ({"ends": [2, 2, 3]}, "ends: expected ascending numbers"),
        ({"ends": [1, "3"]}, "ends: expected ascending numbers"),
        ({"settings": 3}, "not iterable"),
        ("{", "JSON"),
        ("{}", "no 'spectrain_"),
    ],
)
def test_a_damaged_plan(tmp_path, change, why):
    model, path = three(), tmp_path / "plan.json"
    if isinstance(change, dict):
        change = json.dumps({**document_of(three), **change})
        why = f"one that spectrain plan .*{why}"
    path.write_text(change)
    with pytest.raises(ValueError, match=f"plan.json: expected .*{why}"):
        st.partition(model, plan=path)
    assert not hasattr(model, "cut")


def test_what_is_no_plan(tmp_path):
    said = "plan: expected a file's name, a TrainingPlan or its document, got"
    with pytest.raises(TypeError, match=said):
        st.partition(linears(), plan=3)
    with pytest.raises(FileNotFoundError):
        st.partition(linears(), plan=tmp_path / "no.json")
