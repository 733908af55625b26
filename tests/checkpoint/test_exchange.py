"""Tests what else reads a checkpoint: libraries, models, dtypes, layouts, methods, frozen ones."""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_cases import (
    LOSS,
    Noisy,
    batches,
    body_of,
    ends,
    model,
    nadam,
    narrow,
    pipeline,
    refused,
    renamed,
    same,
    sgd,
    state_of,
    tied,
    train,
    weights,
)
from helpers.foreign_optimizers import Lion
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.ao import quantization
from torch.distributed.checkpoint import state_dict as torchs

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointError, ShuffledSampler, load, save
from spectrain_ext.partitioning import cut_at


def test_safetensors_own_tools_read_the_weights_and_people_the_document(saved: Path) -> None:
    file = saved / "model.safetensors"
    plain, pipe = model(seed=5), pipeline(3)
    plain.load_state_dict(load_file(file))
    load(saved, pipe)
    same(weights(plain), dict(pipe.state_dict()))
    assert file.stat().st_mode == (saved / "checkpoint.json").stat().st_mode
    body = body_of(saved)
    assert (body["minibatches"], body["version"]) == (3, 2)
    assert [stage["stage"] for stage in body["stages"]] == [0, 1]
    assert body["stages"][0]["optimizer"]["groups"][0]["options"]["momentum"] == 0.9
    assert body["tensors"]["model.2.linear.weight"]["shape"] == [4, 4]


@pytest.mark.filterwarnings("ignore")  # of torch's own
def test_distributed_checkpoints_of_torch(tmp_path: Path) -> None:
    """They take a pipeline's state_dict, or the uncut model with the pipeline's optimizers."""
    whole = model()
    kept = st.Pipeline(cut_at(whole, [1, 4]), nadam, LOSS)
    train(kept, batches(2))
    options: Any = {"checkpoint_id": tmp_path / "model", "no_dist": True}
    dcp.save(kept.state_dict(), **options)
    other = pipeline(3, seed=5)
    state = other.state_dict()
    dcp.load(state, **options)
    other.load_state_dict(state)
    same(dict(other.state_dict()), dict(kept.state_dict()))
    calls: list[Any] = [
        lambda: torchs.get_model_state_dict(kept),
        lambda: torchs.set_model_state_dict(kept, kept.state_dict()),
        lambda: torchs.get_optimizer_state_dict(kept, kept.optimizers),
        lambda: torchs.get_state_dict(kept, kept.optimizers),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"save pipe\.state_dict\(\), or in one process give"):
            call()

    options["checkpoint_id"] = tmp_path / "all"
    found = torchs.get_state_dict(whole, kept.optimizers)
    dcp.save(dict(zip("mo", found, strict=True)), **options)
    another = model(seed=6)
    pipe = st.Pipeline(cut_at(another, [1, 4]), nadam, LOSS)
    into = dict(zip("mo", torchs.get_state_dict(another, pipe.optimizers), strict=True))
    dcp.load(into, **options)
    torchs.set_state_dict(
        another, pipe.optimizers, model_state_dict=into["m"], optim_state_dict=into["o"]
    )
    for key in ("model", "state"):
        same(state_of(pipe)[key], state_of(kept)[key])

    # stages without names of an uncut model have those of their modules
    stages = st.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], sgd, LOSS)
    same(dict(torchs.get_model_state_dict(stages)), dict(stages.state_dict()))


class Odd(nn.Module):
    """A module whose names mean something else in JSON documents or in files of tensors."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("$w", "$tensor", "$dict", "__metadata__", "model", "a'"):
            self.register_parameter(name, nn.Parameter(torch.randn(4)))
        self.register_buffer("$tuple", torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(self.parameters())


def test_any_name_of_a_parameter(tmp_path: Path) -> None:
    pipe, other = (st.Pipeline([nn.Linear(4, 4), Odd()], nadam, LOSS) for _ in range(2))
    train(pipe, batches(2))
    save(tmp_path / "c", pipe)
    load(tmp_path / "c", other)
    same(dict(other.state_dict()), dict(pipe.state_dict()))
    states = [[o.state_dict()["state"] for o in each.optimizers] for each in (other, pipe)]
    same(*states)
    whole = nn.Sequential(nn.Linear(4, 4), Odd())  # stages without names have its names
    load(tmp_path / "c", whole)
    same(dict(whole.state_dict()), dict(pipe.state_dict()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(12, dtype=torch.bfloat16)[2:8:2],
        torch.tensor(1 + 2j),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.tensor([1, 2, 65535], dtype=torch.uint16),
        torch.zeros(2).to(torch.float8_e4m3fn),
        torch.zeros(0, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_every_tensor_is_read_as_torch_reads_it(tmp_path: Path, tensor: Tensor) -> None:
    def module(value: Tensor) -> nn.Module:
        found = nn.Module()
        found.register_buffer("it", value)
        return found

    save(tmp_path / "c", module(tensor))
    loaded = module(torch.zeros_like(tensor))
    load(tmp_path / "c", loaded)
    assert torch.equal(loaded.it, tensor)


# Optimizers


def test_tensor_learning_rates_stay_what_they_are(tmp_path: Path) -> None:
    plain = model()
    optimizer = torch.optim.Adam(plain.parameters(), lr=torch.tensor(0.25))
    save(tmp_path / "c", plain, optimizer=optimizer)
    a = torch.optim.Adam(plain.parameters(), lr=torch.tensor(0.5), foreach=False)
    b = torch.optim.Adam(plain.parameters(), lr=0.5)
    for other in (a, b):
        load(tmp_path / "c", plain, optimizer=other)
    (one,), (two,) = a.param_groups, b.param_groups
    same([one["lr"], one["foreach"], two["lr"]], [torch.tensor(0.25), False, 0.25])


def test_in_a_model_of_another_dtype_torch_casts_tensors_only(tmp_path: Path) -> None:
    class Remembering(Lion):
        def step(self) -> None:
            super().step()
            for p in self.param_groups[0]["params"]:
                past = deque([torch.ones(3), "one"], maxlen=2)
                self.state[p].update(past=past, name="it", rate=0.5)

    kept = pipeline(2, optimizer=Remembering, method="sync", scheduler=None)
    train(kept, batches(1))
    save(tmp_path / "c", kept)
    wide = model().double()
    optimizer = Remembering(list(wide.parameters()))
    load(tmp_path / "c", wide, optimizer=optimizer)
    past = deque([torch.ones(3).double(), "one"], maxlen=2)
    for p in wide.parameters():
        average = optimizer.state[p].pop("exp_avg")
        assert average.dtype == torch.float64
        same(optimizer.state[p], {"past": past, "name": "it", "rate": 0.5})


# Masters


def test_masters_and_float32_models_exchange_all_digits(tmp_path: Path) -> None:
    pipe, plain = pipeline(2, make=narrow, master_dtype=torch.float32), model(seed=5)
    train(pipe, batches(3, dtype=torch.bfloat16))
    masters = state_of(pipe)["masters"]
    assert any(not torch.equal(m.bfloat16().float(), m) for m in masters.values())
    save(tmp_path / "narrow", pipe)
    load(tmp_path / "narrow", plain)
    same({name: p.data for name, p in plain.named_parameters()}, masters)
    save(tmp_path / "wide", plain)
    other = pipeline(4, 6, make=narrow, master_dtype=torch.float32)
    load(tmp_path / "wide", other, only_model=True)
    same(state_of(other)["masters"], masters)
    save(tmp_path / "model", pipe, only_model=True)  # without the masters
    load(tmp_path / "model", plain)
    for name, tensor in pipe.state_dict().items():
        same(plain.state_dict()[name], tensor.to(plain.state_dict()[name].dtype))


def test_a_parameter_that_was_changed_counts_more_than_its_master(tmp_path: Path) -> None:
    pipe, plain = pipeline(2, make=narrow, master_dtype=torch.float32), model(seed=5)
    train(pipe, batches(2, dtype=torch.bfloat16))
    with torch.no_grad():
        next(pipe.parameters()).fill_(3.0)
    save(tmp_path / "c", pipe)
    load(tmp_path / "c", plain)
    assert torch.equal(plain[0].linear.weight, torch.full((4, 4), 3.0))


# Tied weights


def test_compiled_stages(tmp_path: Path) -> None:
    stages = [torch.compile(stage, backend="eager") for stage in cut_at(tied(), [2, 4])]
    pipe = st.Pipeline(stages, sgd, LOSS, scheduler=None)
    train(pipe, batches(2))
    save(tmp_path / "c", pipe)
    plain, other = tied(seed=3), pipeline(3, 4, make=tied, scheduler=None)
    for target in (plain, other, pipe):
        load(tmp_path / "c", target)
        same(dict(target.state_dict()), dict(pipe.state_dict()))


def test_a_checkpoint_of_a_model_without_the_tie_is_refused(tmp_path: Path) -> None:
    untied = tied(seed=3)
    untied[3][0].weight = nn.Parameter(untied[0][0].weight.detach().clone())
    save(tmp_path / "same", untied)
    with torch.no_grad():
        untied[3][0].weight[0, 0] += 1
    save(tmp_path / "other", untied)
    for target in (tied(), pipeline(1, make=tied), pipeline(3, make=tied)):
        before = weights(target)
        with pytest.raises(CheckpointError, match=r"'0\.0\.weight' and '3\.0\.weight' are one ten"):
            load(tmp_path / "other", target, only_model=True)
        same(weights(target), before)
        load(tmp_path / "same", target, only_model=True)
        assert torch.equal(target.state_dict()["3.0.weight"], untied[0][0].weight)


def test_the_uncut_model_loads_what_other_processes_have_trained_without_a_warning(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    stages = cut_at(model, [1, 2])
    save(tmp_path / "c", model)
    stages[0].cut.origin.trained_elsewhere([1])
    with pytest.warns(UserWarning, match=r"have trained stages \[1\] of this model"):
        model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path / "c", model)
        model.state_dict()


# Frozen tensors that their modules refuse to load


class Quantized(nn.Module):
    """Gives its frozen weight with a scale under another name, as layers of bitsandbytes do."""

    takes_back = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        dense = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.scale = dense.abs().max() / 127
        packed = (dense / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale) + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.takes_back:
            self.scale = state_dict.pop(prefix + "weight.scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Restored(Quantized):
    takes_back = True


def quantized(n: int, kind: type[Quantized] = Quantized, seed: int = 0) -> st.Pipeline:
    torch.manual_seed(seed)
    blocks = [layer for k in range(3) for layer in (kind(k), nn.Linear(4, 4), nn.Tanh())]
    return st.Pipeline(cut_at(nn.Sequential(*blocks), ends(9, n)), sgd, LOSS, "sync")


def test_frozen_weights_that_a_module_refuses_to_load(tmp_path: Path) -> None:
    kept = quantized(3)
    train(kept, batches(2))
    with pytest.warns(UserWarning, match=r"stage 1: 3\.weight, 3\.weight\.scale are not saved"):
        save(tmp_path / "c", kept)
    assert [stage["left_out"] for stage in body_of(tmp_path / "c")["stages"]] == [
        [f"{k}.weight", f"{k}.weight.scale"] for k in (0, 3, 6)
    ]
    expected = train(kept, batches(2, seed=1))
    for n in (3, 2):
        other = quantized(n, seed=9)
        with pytest.warns(UserWarning, match=r"stage 0: 0\.weight, .* keep their present values"):
            load(tmp_path / "c", other)
        assert train(other, batches(2, seed=1)) == expected


@pytest.mark.parametrize("takes_back", [False, True])
def test_packed_weights_that_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_back: bool
) -> None:
    """Those of a module that loads them, and those of an earlier version of this package."""
    kept = quantized(3, Restored)
    train(kept, batches(2))
    save(tmp_path / "c", kept)
    expected = train(kept, batches(2, seed=1))
    monkeypatch.setattr(Restored, "takes_back", takes_back)
    other = quantized(1, Restored, seed=9)
    with nullcontext() if takes_back else pytest.warns(UserWarning, match="keep their present"):
        load(tmp_path / "c", other)
    assert train(other, batches(2, seed=1)) == expected


@pytest.mark.parametrize("kind", [Quantized, Restored])
def test_packed_weights_are_of_the_base(tmp_path: Path, kind: type[Quantized]) -> None:
    """Whether or not their module loads them."""
    kept = quantized(3, kind)
    train(kept, batches(2))
    save(tmp_path / "c", kept, trainable_only="verified")
    assert not [key for key in body_of(tmp_path / "c")["tensors"] if key.endswith(("scale", "0.w"))]
    expected = train(kept, batches(2, seed=1))
    other = quantized(2, kind, seed=9)
    load(tmp_path / "c", other)
    assert train(other, batches(2, seed=1)) == expected
    dense = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    with pytest.raises(
        CheckpointError, match=r"base: '0\.weight' is int8, which does not fit into"
    ):
        load(tmp_path / "c", dense, only_model=True)


# What a module's own hooks take


def aware(seed: int = 0) -> nn.Sequential:
    """Return layers for quantization-aware training, whose observers size their buffers later."""
    torch.manual_seed(seed)
    found = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    found.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(found.train())  # type: ignore[no-any-return]


@pytest.mark.filterwarnings(
    "ignore:.*reduce_range", "ignore:torch.ao", "ignore::DeprecationWarning"
)
def test_quantization_aware_training(tmp_path: Path) -> None:
    kept, plain = pipeline(2, make=aware, scheduler=None), aware(2)
    train(kept, batches(3))
    save(tmp_path / "c", kept, sampler=ShuffledSampler(9, 2))
    refused(
        tmp_path / "c",
        "does not fit the sampler: samples",
        pipeline(2, 1, make=aware, scheduler=None),
        sampler=ShuffledSampler(8, 2),
    )
    load(tmp_path / "c", plain, only_model=True)
    same(dict(plain.state_dict()), dict(kept.state_dict()))
    resumed = [pipeline(n, 1, make=aware, scheduler=None) for n in (2, 3)]
    for pipe in resumed:
        load(tmp_path / "c", pipe)
        same(dict(pipe.state_dict()), dict(kept.state_dict()))
    assert train(resumed[0], batches(2, seed=1)) == train(kept, batches(2, seed=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_renames_its_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """With the optimizer's state, and the masters; into other cuts, and a module."""
    more: Any = {"optimizer": nadam, "master_dtype": torch.float32}

    def made(n: int, seed: int, make: Any) -> st.Pipeline:
        return pipeline(n, seed, make=lambda seed: make(seed).to(dtype), **more)

    kept, plain = made(2, 0, model), renamed(8).to(dtype)
    train(kept, batches(3, dtype=dtype))
    save(tmp_path / "c", kept)

    def as_saved(pipe: st.Pipeline) -> Any:
        found = state_of(pipe)
        for key in ("model", "masters", "state", "options"):
            found[key] = {n.replace("inner", "linear"): v for n, v in found[key].items()}
        return found

    whole, others = made(1, 5, renamed), [made(n, 6, renamed) for n in (2, 3)]
    for pipe in (*others, whole):
        load(tmp_path / "c", pipe)
        for key in ("model", "masters", "state"):
            same(as_saved(pipe)[key], state_of(kept)[key])
    optimizer = torch.optim.NAdam(plain.parameters())
    load(tmp_path / "c", plain, optimizer=optimizer)
    same([*plain.state_dict().values()], [*kept.state_dict().values()])
    assert len(optimizer.state) == len([*plain.parameters()])
    expected = train(kept, batches(2, seed=1, dtype=dtype))
    assert train(others[0], batches(2, seed=1, dtype=dtype)) == expected
    save(tmp_path / "new", others[0])  # under the new names, which the layer is not to change
    load(tmp_path / "new", others[1])
    same(as_saved(others[1])["model"], state_of(kept)["model"])


class Halves(Noisy):
    """Has its layer in two, and takes the whole one; and no longer has what was once a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        self.register_load_state_dict_pre_hook(self.cut)

    @staticmethod
    def cut(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state.pop(f"{prefix}mask", None)
        for name in ("weight", "bias"):
            if f"{prefix}linear.{name}" in state:
                halves = state.pop(f"{prefix}linear.{name}").chunk(2)
                state |= {f"{prefix}linear.{k}.{name}": half for k, half in enumerate(halves)}

    def forward(self, x: Tensor) -> Tensor:
        parts = [each(x) for each in self.linear]
        return x + self.drop(self.norm(torch.tanh(torch.cat(parts, -1))))


def test_a_layer_that_computes_its_tensors_from_others(tmp_path: Path) -> None:
    """Without an optimizer: nobody says what its state becomes."""
    kept = model()
    kept[2].register_buffer("mask", torch.ones(3))
    save(tmp_path / "c", kept)
    save(tmp_path / "trained", pipeline(2, make=lambda _: kept))
    for target in (model(3, kind=Halves), pipeline(3, 3, make=lambda s: model(s, kind=Halves))):
        load(tmp_path / "c", target, only_model=True)
        state = target.state_dict()
        halves = torch.cat([state["3.linear.0.weight"], state["3.linear.1.weight"]])
        assert torch.equal(halves, kept[3].linear.weight)
        same(state["1.norm.running_mean"], kept[1].norm.running_mean)
        if isinstance(target, st.Pipeline):
            match = r"has no '0\.linear\.0\.weight': its module computes it from other"
            refused(tmp_path / "trained", match, target)
