"""Tests the state of optimizers from outside the package: saved completely, or rejected."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch
from helpers.checkpoint_cases import LOSS, batches, everything, model, pipeline, train
from helpers.foreign_optimizers import FOREIGN, PECULIAR, Counting, Lion, Projecting, Whitened
from helpers.forged_checkpoints import forge
from torch import nn

import spectrain_ext as st
from spectrain_ext.checkpoint import load, save
from spectrain_ext.errors import CheckpointError
from spectrain_ext.partitioning import cut_at

every_optimizer = pytest.mark.parametrize("name", FOREIGN)


def same(found, expected, where=""):
    """Return whether the containers are the same and hold the same bits."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple, deque)):
        assert len(found) == len(expected), where
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None), where
        for k, value in enumerate(expected):
            same(found[k], value, f"{where}[{k}]")
    else:
        assert found == expected, where


def states(pipe):
    """Return the state of every parameter by its name in the model."""
    return {
        stage.full_name(k): o.state[p]
        for stage, o in zip(pipe.children(), pipe.optimizers, strict=True)
        for k, p in stage.named_parameters()
    }


@pytest.mark.parametrize("method", ["vanilla", "lwp-w"])
@every_optimizer
def test_stopped_and_continued_is_never_stopped(tmp_path, name, method):
    kept = pipeline(3, optimizer=FOREIGN[name], method=method)
    train(kept, batches(3))
    save(tmp_path / "c", kept)
    other = pipeline(3, seed=9, optimizer=FOREIGN[name], method=method)
    train(other, batches(2, seed=4))  # it has its own state
    load(tmp_path / "c", other)
    same(everything(other), everything(kept))
    assert train(other, batches(5, seed=1)) == train(kept, batches(5, seed=1))


@pytest.mark.parametrize("method", ["sync", "lwp-w"])
@pytest.mark.parametrize("name", PECULIAR)
def test_what_torchs_load_state_dict_takes(tmp_path, name, method):
    """Options of a first step, state of no parameter, deques, dtypes, no learning rate."""

    def made(n, seed=0):
        return pipeline(n, seed, optimizer=PECULIAR[name], method=method, scheduler=None)

    def options(pipe):
        groups = [group for o in pipe.optimizers for group in o.param_groups]
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    kept, fresh, used = made(2), made(2, 9), made(2, 9)
    train(kept, batches(3))
    save(tmp_path / "c", kept)
    train(used, batches(4, seed=4))
    others = [made(n, 9) for n in (1, 3)] if method == "sync" else []
    for pipe in (fresh, used, *others):
        load(tmp_path / "c", pipe)
    same(everything(fresh), everything(kept))
    same(options(fresh), options(kept))
    same(options(used), options(kept))
    for pipe in others:
        same(states(pipe), states(kept))
        same(options(pipe), options(kept)[:1] * len(pipe.optimizers))
        train(pipe, batches(1, seed=1))
    expected = train(kept, batches(5, seed=1))
    assert train(fresh, batches(5, seed=1)) == train(used, batches(5, seed=1)) == expected


def test_in_a_model_of_another_dtype_torch_casts_tensors_only(tmp_path):
    class Remembering(Lion):
        def step(self):
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


def test_values_of_one_stage_do_not_load_into_parts_of_two(tmp_path):
    kept, other = (pipeline(n, optimizer=Counting, method="sync") for n in (2, 1))
    train(kept, batches(1))
    kept.optimizers[0].state["total"] = 7
    save(tmp_path / "state", kept)
    kept.optimizers[0].param_groups[0]["powers"] = torch.zeros(3)
    save(tmp_path / "group", kept)
    before = copy.deepcopy(everything(other))
    for name, match in (("state", "the state of .* with state="), ("group", "with powers=")):
        with pytest.raises(CheckpointError, match=f"{match}.*load into the saved stages"):
            load(tmp_path / name, other)
    same(everything(other), before)


def test_an_option_of_a_later_step_does_not_stay(tmp_path):
    kept, used = (pipeline(1, optimizer=Counting, method="sync") for _ in range(2))
    save(tmp_path / "c", kept)
    train(used, batches(2))
    load(tmp_path / "c", used)
    assert train(used, batches(2)) == train(kept, batches(2))
    assert used.optimizers[0].param_groups[0]["step"] == 2


@pytest.mark.parametrize("name", ["Muon", "Whitened", "Adafactor"])
def test_any_cut_loads_into_any_other(tmp_path, name):
    saved = pipeline(3, optimizer=FOREIGN[name], method="lwp-w")
    train(saved, batches(3))
    save(tmp_path / "c", saved)
    plain, alone = model(seed=4), pipeline(1, seed=5, optimizer=FOREIGN[name], method="lwp-w")
    optimizer = FOREIGN[name](list(plain.parameters()))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
    load(tmp_path / "c", plain, optimizer=optimizer, scheduler=scheduler)
    load(tmp_path / "c", alone)
    expected = states(saved)
    for key, p in plain.named_parameters():
        same(optimizer.state[p], expected[key], key)
    same(states(alone), expected)


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Whitened"])
def test_state_of_float32_masters(tmp_path, name):
    """torch would load it in the parameters' 16 bits."""

    def made(seed):
        stages = cut_at(model(seed).bfloat16(), [2, 4])
        return st.Pipeline(
            stages, FOREIGN[name], LOSS, "lwp-w", master_dtype=torch.float32, microbatches=2
        )

    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(6)]
    kept, other = made(0), made(3)
    train(kept, data[:3])
    save(tmp_path / "c", kept)
    load(tmp_path / "c", other)
    same(everything(other), everything(kept))
    assert train(other, data[3:]) == train(kept, data[3:])


class Wide(torch.optim.Optimizer):
    """Has float32 momentum for 16-bit parameters, which is common."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("sums", {"of": torch.zeros_like(p, dtype=torch.float32)})
            state.setdefault("product", torch.ones(()))
            state["product"] *= 0.9
            state["sums"]["of"].mul_(0.9).add_(p.grad.float())
            p.sub_(self.param_groups[0]["lr"] * state["product"] * state["sums"]["of"])


@pytest.mark.filterwarnings("ignore:.*rounded away")
@pytest.mark.parametrize("optimizer", [Wide, torch.optim.NAdam])
def test_state_that_is_wider_than_its_parameters(tmp_path, monkeypatch, optimizer):
    """torch would round it, for example NAdam's product of momenta."""

    def made(seed, dtype=torch.bfloat16, **more):
        stages = cut_at(model(seed).to(dtype), [2, 4])
        return st.Pipeline(stages, optimizer, LOSS, "vanilla", scheduler=scheduler, **more)

    def scheduler(o):
        return torch.optim.lr_scheduler.StepLR(o, 2, 0.5)

    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(6)]
    kept, other = made(0), made(3)
    train(kept, data[:3])
    save(tmp_path / "c", kept)
    train(other, data[:1])
    before = copy.deepcopy(everything(other))
    last = other.schedulers[1]  # loaded after optimizers
    loads, planned = type(last).load_state_dict, [ZeroDivisionError]

    def load_or_fail(self, state):
        if self is last and planned:
            raise planned.pop()
        loads(self, state)

    monkeypatch.setattr(type(last), "load_state_dict", load_or_fail)
    with pytest.raises(CheckpointError, match="does not fit the scheduler of stage 1"):
        load(tmp_path / "c", other)
    same(everything(other), before)
    assert not planned
    load(tmp_path / "c", other)
    same(everything(other), everything(kept))
    # With other weights the result is torch's.
    for dtype, more in (
        (torch.float32, {}),
        (torch.bfloat16, {"master_dtype": torch.float32}),
    ):
        wide = made(4, dtype, **more)
        load(tmp_path / "c", wide)
        train(wide, [(x.to(dtype), y.to(dtype)) for x, y in data[:2]])
        state = next(iter(wide.optimizers[0].state.values()))
        assert all(
            tensor.dtype == torch.float32
            for key, tensor in state.items()
            if key != "step" and isinstance(tensor, torch.Tensor)
        )
    assert train(other, data[3:]) == train(kept, data[3:])


class Peculiar(Lion):
    """Has more state than Lion."""

    kept: object

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["more"] = self.kept


@pytest.mark.parametrize(
    ("kept", "match"),
    [
        (object(), r"optimizer of stage 0: 0\.linear\.weight\.more: .* hold a builtins\.object"),
        ([{1, 2}], r"0\.linear\.weight\.more\[0\]: a checkpoint cannot hold a builtins\.set"),
    ],
)
def test_what_cannot_be_kept(tmp_path, monkeypatch, kept, match):
    monkeypatch.setattr(Peculiar, "kept", kept, raising=False)
    pipe = pipeline(2, optimizer=Peculiar, method="vanilla")
    train(pipe, batches(1))
    with pytest.raises(TypeError, match=match):
        save(tmp_path / "c", pipe)
    assert not (tmp_path / "c").exists()


def test_an_object_in_the_state(tmp_path):
    pipe = pipeline(2, optimizer=Projecting, method="vanilla")
    train(pipe, batches(1))
    with pytest.raises(TypeError, match=r"0\.linear\.weight\.projector: .*\.Projecting\.Projector"):
        save(tmp_path / "c", pipe)


def test_state_without_names(tmp_path):
    pipe = pipeline(2, optimizer=Lion, method="vanilla")
    train(pipe, batches(1))
    state = pipe.optimizers[1].state
    first = next(iter(state))
    state[first] = {1: 2}
    with pytest.raises(TypeError, match=r"stage 1: 2\.linear\.weight: its state is not a dict"):
        save(tmp_path / "c", pipe)
    state[first] = {}
    save(tmp_path / "c", pipe)


def test_a_state_dict_of_another_form(tmp_path):
    class Own(Lion):
        def state_dict(self):
            return {"whole": super().state_dict()}

    pipe = pipeline(2, optimizer=Own, method="vanilla")
    with pytest.raises(TypeError, match=r"stage 0: the state_dict\(\) of a Own has not the form"):
        save(tmp_path / "c", pipe)


def test_keys_with_dots(tmp_path):
    class Dotted(Lion):
        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p].update({"a.b": torch.ones(3), "a%2Eb": 5, "100%": torch.zeros(())})

    pipe, other = (pipeline(2, s, optimizer=Dotted, method="vanilla") for s in (0, 1))
    train(pipe, batches(1))
    save(tmp_path / "c", pipe)
    load(tmp_path / "c", other)
    same(everything(other), everything(pipe))


@pytest.fixture
def whitened(tmp_path):
    pipe = pipeline(2, optimizer=Whitened, method="vanilla")
    train(pipe, batches(1))
    save(tmp_path / "c", pipe)
    return tmp_path / "c"


def inside(body):
    """Return the document's entry of a list of matrices."""
    return body["stages"][0]["optimizer"]["state"]["0.linear.weight"]["GG"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: inside(b)[0].update({"$tensor": "GG[7]"}), r"has no tensor 'GG\[7\]', which"),
        (lambda b: inside(b)[0].update({"$tensor": 3}), r"nothing uses '.*weight\.GG\[0\]'"),
        (lambda b: inside(b)[0].update(more=3), r"weight\.GG': '\$tensor' with 'opt.*GG\[0\]'"),
        (lambda b: b.update(extra={"$tensor": "x"}), r"extra: '\$tensor' with 'x'"),
    ],
)
def test_forged(whitened, change, match):
    forge(whitened, change)
    pipe = pipeline(2, seed=3, optimizer=Whitened, method="vanilla")
    train(pipe, batches(1, seed=2))
    before = copy.deepcopy(everything(pipe))
    with pytest.raises(CheckpointError, match=match):
        load(whitened, pipe)
    same(everything(pipe), before)


def test_the_packages_own_and_torchs_take_only_their_own_state(tmp_path):
    for k, name in enumerate(("SGD", "AdamW")):
        pipe = pipeline(2, optimizer=FOREIGN[name], method="vanilla")
        train(pipe, batches(2))
        save(tmp_path / name, pipe)
        ours = (st.optim.SGD, st.optim.AdamW)[k]
        back = pipeline(3, seed=2, optimizer=lambda p, o=ours: o(p, lr=1.0), method="vanilla")
        load(tmp_path / name, back)
        train(back, batches(1))
        key = ("momentum_buffer", "exp_avg")[k]
        forge(
            tmp_path / name,
            lambda b, key=key: b["tensors"][f"optimizer.state.0.linear.weight.{key}"].update(
                shape=[16]
            ),
        )
        for optimizer in (FOREIGN[name], lambda p, o=ours: o(p, lr=1.0)):
            other = pipeline(2, seed=2, optimizer=optimizer, method="vanilla")
            with pytest.raises(CheckpointError, match=r"has shape \[16\], expected \[4, 4\]"):
                load(tmp_path / name, other)


WALKING = {  # their kernels access raw memory
    "torch's SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "torch's Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "torch's AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "torch's Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "SGD": lambda p: st.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: st.optim.AdamW(p, lr=0.01),
}


def convolutions(seed, layout):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(2, 2)]
    return nn.Sequential(*layers).to(memory_format=layout)


def images(seed, count):
    generator = torch.Generator().manual_seed(seed)
    shapes = (4, 3, 5, 5), (4, 2)
    return [tuple(torch.randn(s, generator=generator) for s in shapes) for _ in range(count)]


def check_strides(optimizers):
    """Check that state of a parameter's shape has its strides."""
    for optimizer in optimizers:
        assert optimizer.state
        for p, entry in optimizer.state.items():
            assert all(v.stride() == p.stride() for v in entry.values() if v.shape == p.shape)


@pytest.mark.parametrize("name", WALKING)
def test_state_lies_in_memory_as_its_parameter(tmp_path, name):
    def made(seed, layout=torch.channels_last):
        stages = cut_at(convolutions(seed, layout), [2, 5])
        return st.Pipeline(stages, WALKING[name], LOSS, "vanilla")

    kept, other = made(0), made(1)
    train(kept, images(0, 3))
    save(tmp_path / "c", kept)
    load(tmp_path / "c", other)
    assert train(other, images(1, 3)) == train(kept, images(1, 3))
    same(everything(other), everything(kept))

    # independent of its strides when saved
    rows = made(2, torch.contiguous_format)
    load(tmp_path / "c", rows)
    check_strides(rows.optimizers)
    for theirs, mine in zip(rows.optimizers, other.optimizers, strict=True):
        mine.load_state_dict(theirs.state_dict())
    check_strides(other.optimizers)
    save(tmp_path / "rows", rows)
    plain = convolutions(3, torch.channels_last)
    optimizer = WALKING[name](list(plain.parameters()))
    load(tmp_path / "rows", plain, optimizer=optimizer)
    check_strides([optimizer])


def test_other_state_lies_in_memory_as_it_was_saved(tmp_path):
    class Columns(Lion):
        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["columns"] = [torch.randn(2, 3).T, torch.randn(2, 3, 4).mT]
                self.state[p]["every other"] = torch.randn(2, 3, 4)[:, :, ::2].mT

    kept, other = (pipeline(1, s, optimizer=Columns, method="vanilla") for s in (0, 1))
    train(kept, batches(1))
    save(tmp_path / "c", kept)
    load(tmp_path / "c", other)
    same(everything(other), everything(kept))
    entry = next(iter(other.optimizers[0].state.values()))
    assert [value.stride() for value in entry["columns"]] == [(1, 3), (12, 1, 4)]
    assert entry["every other"].stride() == (6, 1, 2)
