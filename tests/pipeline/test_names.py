"""Tests that a pipeline's state dict has the uncut model's names, and either loads the other's."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from helpers.pipeline_cases import sgd
from torch import nn

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at

LOSS = nn.functional.mse_loss
MATCHED = "<All keys matched successfully>"


def named():
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(3, 4),
            norm=nn.BatchNorm1d(4),
            middle=nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            last=nn.Linear(4, 3),
        )
    )


class Scales(nn.Module):
    """Each stage reads a constant buffer."""

    def __init__(self):
        super().__init__()
        self.body = named()
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x):
        for layer in self.body:
            x = layer(x) * self.scale
        return x


def data(count):
    return [(torch.randn(5, 3), torch.randn(5, 3)) for _ in range(count)]


def sliced(model):
    return cut_at(model, [1, 3, 4])


def traced(model):
    return st.partition(model, 3, torch.randn(5, 3), split_points=["body.norm", "body.last"])


CASES = {
    "named": (named, sliced),
    "numbered": (lambda: nn.Sequential(*named()), sliced),
    "traced": (Scales, traced),
}


def same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_either_loads_what_the_other_has(case):
    make, cut = CASES[case]
    model, other, wide = make(), make(), make().double()
    pipe = st.Pipeline(cut(model), sgd(), LOSS, method="spectrain")
    list(pipe.run(data(4)))
    same(pipe.state_dict(), model.state_dict())
    other.load_state_dict(pipe.state_dict())
    same(other.state_dict(), model.state_dict())
    # Models of another dtype get the true weights, and the pipeline's own one keeps its memory.
    before = [p.data_ptr() for p in model.parameters()]
    for each in (model, wide):
        each.load_state_dict(pipe.state_dict())
        for name, value in pipe.state_dict().items():
            assert torch.equal(each.state_dict()[name], value.to(each.state_dict()[name].dtype))
    assert before == [p.data_ptr() for p in model.parameters()]
    value = torch.randn(6, 3)
    pipe.eval()
    torch.testing.assert_close(wide.eval()(value.double()), pipe(value).double())
    pipe.train()
    fresh = make().state_dict()
    assert str(pipe.load_state_dict(fresh)) == MATCHED
    same(model.state_dict(), fresh)
    list(pipe.run(data(1)))
    holder = nn.ModuleDict({"pipe": pipe, "more": nn.Linear(1, 1)})
    prefixed = {f"pipe.{name}": tensor for name, tensor in fresh.items()}
    assert list(holder.state_dict()) == [*prefixed, "more.weight", "more.bias"]
    holder.load_state_dict({**holder.state_dict(), **prefixed})
    same(model.state_dict(), fresh)
    pipe.release()
    assert str(wide.load_state_dict(pipe.state_dict())) == MATCHED


@pytest.mark.parametrize("case", ["named", "traced"])
def test_compiled_stages_have_them_too(case):
    make, cut = CASES[case]
    model, other = make(), make()
    stages = [torch.compile(stage, backend="eager") for stage in cut(model)]
    pipe = st.Pipeline(stages, sgd(), LOSS, method="spectrain")
    list(pipe.run(data(2)))
    same(pipe.state_dict(), model.state_dict())
    pipe.load_state_dict(other.state_dict())
    same(model.state_dict(), other.state_dict())


SAVES = {
    "state_dict": lambda model: model.state_dict(),
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "its parameters": lambda model: torch.save([*model.parameters()], io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "a part": lambda model: next(m for m in model.modules() if m._parameters).state_dict(),
    "a wrapper": lambda model: nn.Sequential(nn.Sequential(model)).state_dict(),
}


@pytest.mark.parametrize(
    ("case", "method"), [("named", "spectrain"), ("numbered", "sync"), ("traced", "auto")]
)
def test_a_model_is_not_saved_in_a_run(case, method):
    make, cut = CASES[case]
    model = make()
    pipe = st.Pipeline(cut(model), sgd(), LOSS, method, microbatches=2)

    def refused(run):
        next(run)
        for save in SAVES.values():
            for held in (model, *pipe.children()):
                with pytest.raises(RuntimeError, match=r"run of this pipeline .* own state_dict"):
                    save(held)
        return pipe.state_dict()

    def allowed():
        for name, save in SAVES.items():
            if case != "traced" or name not in ("deepcopy", "torch.save"):
                save(model)
        assert all(not vars(p) for p in model.parameters())

    wrong = [*data(3), (torch.randn(5, 3), torch.randn(5, 3, 3, 3, 7))]
    for batches, end in ((data(3), list), (data(4), lambda run: run.close()), (wrong, list)):
        allowed()
        run = pipe.run(batches)
        saved = refused(run)
        with pytest.raises(st.StageError) if batches is wrong else nullcontext():
            end(run)
    allowed()
    pipe.load_state_dict(saved)
    same(model.state_dict(), saved)


@pytest.mark.compiler
def test_what_refuses_to_be_saved_is_not_compiled_again():
    def losses(wrap):
        torch.manual_seed(0)
        batches = [(torch.randn(6, 3), torch.randn(6, 3)) for _ in range(4)]
        stages = [wrap(nn.Linear(3, 3)) for _ in range(2)]
        pipe = st.Pipeline(stages, sgd(), LOSS)
        found = [r.loss for r in pipe.run(batches)]
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                stages[0](batches[0][0][:3])
                found += [r.loss for r in pipe.run(batches)]
        return found

    torch._dynamo.reset()  # after many compilations in one process nothing is compiled any more
    compiled = losses(lambda module: torch.compile(module, backend="aot_eager", fullgraph=True))
    assert compiled == losses(lambda module: module)


def test_messages_have_the_models_names():
    pipe = st.Pipeline(sliced(named()), sgd(), LOSS)
    state = pipe.state_dict()
    wrong = {k: v for k, v in state.items() if k != "middle.0.bias"}
    wrong.update({"last.weight": torch.zeros(1, 1), "0.0.weight": state["first.weight"]})
    with pytest.raises(RuntimeError) as caught:
        pipe.load_state_dict(wrong)
    for said in (
        'Missing key(s) in state_dict: "middle.0.bias". ',
        'Unexpected key(s) in state_dict: "0.0.weight". ',
        "size mismatch for last.weight: ",
    ):
        assert said in str(caught.value)
    del wrong["last.weight"]
    found = pipe.load_state_dict(wrong, strict=False)
    assert found.missing_keys == ["middle.0.bias", "last.weight"]
    assert found.unexpected_keys == ["0.0.weight"]
    with pytest.raises(RuntimeError, match=r'\(s\) in state_dict: "pipe\.first\.weight"'):
        nn.ModuleDict({"pipe": pipe}).load_state_dict({})


def test_two_names_of_one_tensor():
    def made():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model, fresh = made(), made().state_dict()
    pipe = st.Pipeline(cut_at(model, [2, 3]), sgd(), LOSS)
    assert set(pipe.state_dict()) == set(model.state_dict())
    pipe.load_state_dict(fresh)
    assert torch.equal(pipe.state_dict()["1.weight"], fresh["0.weight"])


def test_stages_of_nobodys_model_have_the_keys_of_a_sequence():
    plain = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))]
    for stages in (
        plain,
        # One that does not know its model's names, or two that both have a "0".
        [*cut_at(nn.Sequential(*map(copy.deepcopy, plain)), [2]), nn.Linear(3, 3)],
        [cut_at(nn.Sequential(nn.Linear(3, 3)), [1])[0] for _ in range(2)],
    ):
        found = st.Pipeline(stages, sgd(), LOSS).state_dict()
        assert list(found) == list(nn.Sequential(*stages).state_dict())
