"""Tests checkpoints: resuming changes no result, and any cut loads into any other."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from helpers.checkpoint_cases import (
    LOSS,
    adamw,
    batches,
    ends,
    everything,
    halving,
    model,
    nadam,
    pipeline,
    same,
    sgd,
    train,
    weights,
)
from helpers.forged_checkpoints import forge
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler as schedules

import spectrain_ext as st
from spectrain_ext.checkpoint import load, save
from spectrain_ext.checkpoint.documents import NAME
from spectrain_ext.checkpoint.progress import Generators
from spectrain_ext.checkpoint.sampler import ShuffledSampler
from spectrain_ext.errors import CheckpointError
from spectrain_ext.partitioning import cut_at
from spectrain_ext.partitioning.blocks import Slice

METHODS = ["sync", "vanilla", "pipedream", "spectrain", "second-order", "lwp-w"]
METHODS += ["interleaved", "interleaved-async", "wpipe", "zb-h1", "zb-h1-async"]
CORRECTED = ["dc-asgd", "gap-aware", "pipemare"]
CASES = [
    *((method, optimizer) for method in (*METHODS, *CORRECTED) for optimizer in (sgd, nadam)),
    *((method, sgd) for method in ("sc-lwp", "error-feedback", "braking")),
]


@pytest.mark.parametrize(("method", "optimizer"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_stopped_and_continued_is_never_stopped(tmp_path, method, optimizer):
    first, second = batches(5), batches(6, seed=1)
    kept = pipeline(3, optimizer=optimizer, method=method)
    train(kept, first)
    noise = torch.randn(3)

    stopped = pipeline(3, optimizer=optimizer, method=method)
    train(stopped, first)
    same(everything(stopped), everything(kept))
    save(tmp_path / "c", stopped, minibatches=5, extra={"best": (0.5, None)})
    expected = torch.rand(2)
    losses = train(kept, second)

    torch.manual_seed(77)
    continued = pipeline(3, seed=9, optimizer=optimizer, method=method)
    loaded = load(tmp_path / "c", continued)
    assert (loaded.minibatches, loaded.extra, loaded.random) == (5, {"best": (0.5, None)}, True)
    assert torch.equal(torch.rand(2), expected)
    assert not torch.equal(noise, expected)
    assert [x.item() for x in train(continued, second)] == [x.item() for x in losses]
    same(everything(continued), everything(kept))
    for found, scheduler in zip(continued.schedulers, kept.schedulers, strict=True):
        assert found.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [sgd, nadam, adamw], ids=["sgd", "nadam", "adamw"])
def test_any_cut_loads_into_any_other(tmp_path, m, optimizer):
    saved = pipeline(3, optimizer=optimizer)
    train(saved, batches(4))
    save(tmp_path / "c", saved)
    other = pipeline(m, seed=5, optimizer=optimizer)
    train(other, batches(1))  # its optimizers have state and are bound
    assert not load(tmp_path / "c", other).random
    save(tmp_path / "again", other)
    third = pipeline(3, seed=6, optimizer=optimizer)
    load(tmp_path / "again", third)
    found, expected = everything(third), everything(saved)
    for states in (found, expected):
        for key in [key for key in states if key.startswith("random")]:
            del states[key]
    same(found, expected)
    assert third.schedulers[0].state_dict() == saved.schedulers[0].state_dict()
    assert len(train(other, batches(3))) == 3


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (sgd, lambda p: torch.optim.SGD(p, lr=9, momentum=0.1)),
        (adamw, lambda p: torch.optim.AdamW(p, lr=9, foreach=False)),
        (nadam, lambda p: torch.optim.NAdam(p, lr=9)),
    ],
    ids=["sgd", "adamw", "nadam"],
)
def test_a_plain_model_and_torchs_optimizer(tmp_path, ours, theirs):
    pipe = pipeline(3, optimizer=ours)
    train(pipe, batches(4))
    save(tmp_path / "c", pipe, minibatches=4)

    plain = model(seed=5)
    optimizer = theirs(plain.parameters())
    scheduler = halving(optimizer)
    load(tmp_path / "c", plain, optimizer=optimizer, scheduler=scheduler)
    names = {p: name for name, p in plain.named_parameters()}
    by_name = {s.full_name(n): p for s in pipe.children() for n, p in s.named_parameters()}
    states = {p: o.state[p] for o in pipe.optimizers for p in o.state}
    for p, name in names.items():
        assert torch.equal(p, by_name[name])
        assert optimizer.state[p].keys() == states[by_name[name]].keys()
        for key, value in states[by_name[name]].items():
            assert torch.equal(optimizer.state[p][key], value), (name, key)
    (group,) = optimizer.param_groups
    theirs_group = pipe.optimizers[0].param_groups[0]
    assert group["lr"] == theirs_group["lr"]
    assert group["weight_decay"] == theirs_group["weight_decay"]
    assert scheduler.state_dict() == pipe.schedulers[0].state_dict()
    LOSS(plain(batches(1)[0][0]), batches(1)[0][1]).backward()
    optimizer.step()

    # and back again
    save(tmp_path / "plain", plain, optimizer=optimizer, scheduler=scheduler)
    back = pipeline(2, seed=3, optimizer=ours)
    load(tmp_path / "plain", back)
    for stage in back.children():
        for name, p in stage.named_parameters():
            assert torch.equal(p, dict(plain.named_parameters())[stage.full_name(name)])


def test_safetensors_own_tools_read_the_weights(tmp_path):
    pipe = pipeline(2)
    train(pipe, batches(2))
    save(tmp_path / "c", pipe)
    plain = model(seed=5)
    plain.load_state_dict(load_file(tmp_path / "c" / "model.safetensors"))
    known = plain.state_dict()
    for stage in pipe.children():
        for name, tensor in stage.state_dict().items():
            assert torch.equal(known[stage.full_name(name)], tensor)
    mode = (tmp_path / "c" / "model.safetensors").stat().st_mode
    assert mode == (tmp_path / "c" / "checkpoint.json").stat().st_mode


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_transformers_read_the_weights(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=8, n_head=2, vocab_size=16, n_positions=8, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    parts = st.partition(transformers.GPT2LMHeadModel(config), 2)
    pipe = st.Pipeline(parts, sgd, loss_fn=parts.loss_fn)
    ids = torch.arange(8).view(1, 8)
    train(pipe, [{"input_ids": ids, "labels": ids}] * 3)
    save(tmp_path / "c", pipe)
    config.save_pretrained(tmp_path / "c")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    load(tmp_path / "c", pipe)  # entries of others do not disturb it
    pipe.eval()
    assert torch.equal(read(ids).logits, pipe({"input_ids": ids}).logits)


def test_a_model_alone(tmp_path):
    save(tmp_path / "c", model(seed=1))
    other = model(seed=2)
    load(tmp_path / "c", other)
    same(weights(other), weights(model(seed=1)))
    pipe = pipeline(2, seed=3)
    with pytest.raises(CheckpointError, match="has no optimizer for stage 0; only_model=True lo"):
        load(tmp_path / "c", pipe)
    save(tmp_path / "optimizer", pipeline(2, scheduler=None))
    with pytest.raises(CheckpointError, match="has no scheduler for stage 0; only_model=True lo"):
        load(tmp_path / "optimizer", pipe)
    train(pipe, batches(2))
    save(tmp_path / "model", pipe, only_model=True)
    with pytest.raises(CheckpointError, match="has no optimizer for stage 0; only_model=True lo"):
        load(tmp_path / "model", pipe)
    load(tmp_path / "model", other)
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(weights(other)[name], tensor)
    load(tmp_path / "c", other)
    momentum = everything(pipe)["state.0.0.momentum_buffer"].clone()
    assert not load(tmp_path / "c", pipe, only_model=True).random
    assert torch.equal(everything(pipe)["state.0.0.momentum_buffer"], momentum)
    for stage in pipe.children():
        for name, tensor in stage.state_dict().items():
            assert torch.equal(weights(other)[stage.full_name(name)], tensor)


def test_stages_without_names_have_those_of_their_sequence(tmp_path):
    def stages():
        return [nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))]

    saved = stages()
    save(tmp_path / "c", st.Pipeline(saved, sgd, LOSS))
    other = nn.Sequential(*stages())
    load(tmp_path / "c", other)
    same(weights(other), weights(nn.Sequential(*saved)))


class Odd(nn.Module):
    """A module whose names mean something else in JSON documents or in files of tensors."""

    def __init__(self):
        super().__init__()
        for name in ("$w", "$tensor", "$dict", "__metadata__", "model", "a'"):
            self.register_parameter(name, nn.Parameter(torch.randn(4)))
        self.register_buffer("$tuple", torch.randn(2))

    def forward(self, x):
        return x * sum(self.parameters())


def test_any_name_of_a_parameter(tmp_path):
    pipe, other = (st.Pipeline([nn.Linear(4, 4), Odd()], nadam, LOSS) for _ in range(2))
    train(pipe, batches(2))
    save(tmp_path / "c", pipe)
    load(tmp_path / "c", other)
    for found, expected in zip(other.optimizers, pipe.optimizers, strict=True):
        same(found.state_dict()["state"][0], expected.state_dict()["state"][0])
    same(other.state_dict(), pipe.state_dict())

    plain, copy = Odd(), Odd()
    optimizer, its = (torch.optim.Adam(each.parameters()) for each in (plain, copy))
    plain(torch.ones(4)).sum().backward()
    optimizer.step()
    save(tmp_path / "plain", plain, optimizer=optimizer)
    load(tmp_path / "plain", copy, optimizer=its)
    same(copy.state_dict(), plain.state_dict())
    for found, expected in zip(copy.parameters(), plain.parameters(), strict=True):
        same(its.state[found], optimizer.state[expected])


def test_frozen_parameters_and_groups(tmp_path):
    def grouped(params):
        return st.optim.SGD(
            [{"params": params[:1], "lr": 0.5}, {"params": params[1:], "nesterov": True}],
            lr=0.1,
            momentum=0.9,
        )

    def stages(seed):
        torch.manual_seed(seed)
        made = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh()]
        made[0].bias.requires_grad_(False)
        return made

    def two(seed, optimizer=grouped):
        a, b, c = stages(seed)
        return st.Pipeline(
            [Slice([a], ["0"]), Slice([b], ["1"]), Slice([c], ["2"])], optimizer, LOSS
        )

    data = [(torch.randn(2, 3), torch.randn(2, 3)) for _ in range(3)]

    def only(params):
        return st.optim.SGD(params, lr=0.3, momentum=0.5)

    def first(params):
        return grouped(params) if len(params) > 1 else only(params)

    saved = two(1, first)
    train(saved, data)
    save(tmp_path / "c", saved)
    other = two(2, first)
    load(tmp_path / "c", other)
    same(everything(other), everything(saved))
    groups = [[g["lr"] for g in o.param_groups] for o in other.optimizers]
    assert groups == [[0.3], [0.5, 0.1]]

    a, b, c = stages(3)
    merged = st.Pipeline([Slice([a, b, c], ["0", "1", "2"])], only, LOSS)
    with pytest.raises(CheckpointError, match=r"group 0 of the optimizer of stage 0: holds '0\.we"):
        load(tmp_path / "c", merged)


def test_an_option_that_the_optimizer_does_not_know(tmp_path):
    def smoothed(params):
        return st.optim.SGD(params, lr=0.1, momentum=0.9, smoothed=True)

    save(tmp_path / "c", pipeline(2, optimizer=smoothed, scheduler=None))
    plain = model()
    with pytest.raises(
        CheckpointError, match="was saved with smoothed=True, which this optimizer does"
    ):
        load(tmp_path / "c", plain, optimizer=torch.optim.SGD(plain.parameters(), momentum=0.9))
    with pytest.raises(CheckpointError, match=r"stage 0 was a SGD, expected a AdamW"):
        load(tmp_path / "c", plain, optimizer=torch.optim.AdamW(plain.parameters()))


def test_tensor_learning_rates_stay_what_they_are(tmp_path):
    plain = model()
    optimizer = torch.optim.Adam(plain.parameters(), lr=torch.tensor(0.25))
    save(tmp_path / "c", plain, optimizer=optimizer)
    a = torch.optim.Adam(plain.parameters(), lr=torch.tensor(0.5), foreach=False)
    b = torch.optim.Adam(plain.parameters(), lr=0.5)
    for other in (a, b):
        load(tmp_path / "c", plain, optimizer=other)
    (one,), (two,) = a.param_groups, b.param_groups
    assert isinstance(one["lr"], torch.Tensor)
    assert one["lr"].item() == 0.25
    assert one["foreach"] is False
    assert two["lr"] == 0.25
    assert type(two["lr"]) is float


def test_bfloat16_stages_keep_float32_momentum(tmp_path):
    def stages(seed):
        torch.manual_seed(seed)
        return [
            Slice([nn.Linear(3, 3).bfloat16()], ["0"]),
            Slice([nn.Linear(3, 3).bfloat16()], ["1"]),
        ]

    def wide(params):
        return st.optim.SGD(params, lr=0.1, momentum=0.9, momentum_dtype=torch.float32)

    data = [(torch.randn(2, 3).bfloat16(), torch.randn(2, 3).bfloat16()) for _ in range(3)]
    saved = st.Pipeline(stages(0), wide, LOSS)
    train(saved, data)
    save(tmp_path / "c", saved)
    other = st.Pipeline(stages(1), wide, LOSS)
    load(tmp_path / "c", other)
    same(everything(other), everything(saved))
    assert other.optimizers[0].state_dict()["state"][0]["momentum_buffer"].dtype == torch.float32


def narrow(seed, n=2, **more):
    stages = cut_at(model(seed).bfloat16(), [(k + 1) * 4 // n for k in range(n)])
    return st.Pipeline(stages, sgd, LOSS, master_dtype=torch.float32, **more)


def rounded(data):
    return [(x.bfloat16(), y.bfloat16()) for x, y in data]


@pytest.mark.parametrize("released", [False, True], ids=["bound", "released"])
def test_masters_of_bfloat16_stages_go_on_to_the_bit(tmp_path, released):
    first, second = rounded(batches(4)), rounded(batches(4, seed=1))
    kept = narrow(0)
    train(kept, first)
    save(tmp_path / "c", kept)
    continued = narrow(5)
    if released:
        continued.release()
    load(tmp_path / "c", continued)
    found, expected = continued.masters(), kept.masters()
    assert len(expected) == 16
    assert all(map(torch.equal, found.values(), expected.values()))
    assert any(not torch.equal(m.bfloat16().float(), m) for m in expected.values())
    losses = train(kept, second)
    assert [x.item() for x in train(continued, second)] == [x.item() for x in losses]
    same(everything(continued), everything(kept))
    assert all(map(torch.equal, continued.masters().values(), kept.masters().values()))


def test_masters_and_float32_models_exchange_all_digits(tmp_path):
    pipe = narrow(0)
    train(pipe, rounded(batches(4)))
    save(tmp_path / "narrow", pipe)
    plain = model(seed=5)
    load(tmp_path / "narrow", plain)
    names = dict(plain.named_parameters())
    masters = pipe.masters()
    for stage in pipe.children():
        for name, p in stage.named_parameters():
            assert torch.equal(names[stage.full_name(name)], masters[p])
    save(tmp_path / "model", pipe, only_model=True)  # without the masters
    load(tmp_path / "model", plain)
    for name, tensor in pipe.state_dict().items():
        found = plain.state_dict()[name]
        assert torch.equal(found, tensor.to(found.dtype))
    save(tmp_path / "wide", plain)
    other = narrow(6, n=4)
    load(tmp_path / "wide", other, only_model=True)
    for found, p in zip(other.masters().values(), plain.parameters(), strict=True):
        assert torch.equal(found, p)


def test_a_parameter_that_was_changed_counts_more_than_its_master(tmp_path):
    pipe = narrow(0)
    train(pipe, rounded(batches(2)))
    with torch.no_grad():
        next(pipe.parameters()).fill_(3.0)
    save(tmp_path / "c", pipe)
    plain = model(seed=5)
    load(tmp_path / "c", plain)
    assert torch.equal(plain[0].linear.weight, torch.full((4, 4), 3.0))


def test_the_samplers_place(tmp_path):
    sampler = ShuffledSampler(10, 3, seed=4)
    list(zip(range(2), sampler, strict=False))
    expected = list(sampler)
    sampler.position = 2
    save(tmp_path / "c", model(), sampler=sampler)
    other = ShuffledSampler(10, 3)
    load(tmp_path / "c", model(), sampler=other)
    assert list(other) == expected
    save(tmp_path / "none", model())
    with pytest.raises(CheckpointError, match="has no state of a sampler"):
        load(tmp_path / "none", model(), sampler=other)


# What does not fit changes nothing


def untouched(pipe, action, error, match):
    before = {key: tensor.clone() for key, tensor in everything(pipe).items()}
    lrs = [g["lr"] for o in pipe.optimizers for g in o.param_groups]
    schedulers = [s.state_dict() for s in pipe.schedulers]
    random = torch.get_rng_state()
    with pytest.raises(error, match=match):
        action()
    same(everything(pipe), before)
    assert [g["lr"] for o in pipe.optimizers for g in o.param_groups] == lrs
    assert [s.state_dict() for s in pipe.schedulers] == schedulers
    assert torch.equal(torch.get_rng_state(), random)


def one_cycle(optimizer):
    return schedules.OneCycleLR(optimizer, 0.1, total_steps=99)


def in_sequence(first):
    return lambda o: schedules.SequentialLR(
        o, [first(o), schedules.ConstantLR(o, 1.0)], milestones=[3]
    )


def step(optimizer):
    return schedules.StepLR(optimizer, 3)


def exponential(optimizer):
    return schedules.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize(
    ("saved", "here", "change", "match"),
    [
        (
            one_cycle,
            one_cycle,
            lambda state: state["_schedule_phases"][1].pop("end_step"),
            r"stage 0\._schedule_phases\[1\]: has no 'end_step', which OneCycleLR has",
        ),
        (one_cycle, one_cycle, lambda state: state.pop("total_steps"), "has no 'total_steps'"),
        (
            step,
            halving,
            None,
            r"stage 0: has no 'milestones', which MultiStepLR has; has 'step_size', which MultiSt",
        ),
        (step, exponential, None, "stage 0: has 'step_size', which ExponentialLR has not"),
        (
            in_sequence(step),
            in_sequence(exponential),
            None,
            r"stage 0\._schedulers\[0\]: has 'step_size', which SequentialLR has not",
        ),
    ],
)
def test_the_state_of_another_scheduler(tmp_path, saved, here, change, match):
    """Some would fail in their first step, and some would silently continue with missing state."""
    save(tmp_path / "c", pipeline(2, scheduler=saved))
    if change is not None:
        forge(tmp_path / "c", lambda body: change(body["stages"][0]["scheduler"]))
    pipe = pipeline(2, seed=1, scheduler=here)
    train(pipe, batches(2))
    untouched(pipe, lambda: load(tmp_path / "c", pipe), CheckpointError, match)
    train(pipe, batches(2))


def test_what_versions_add_to_a_scheduler(tmp_path):
    plain, paced = (pipeline(2, scheduler=step, method=m) for m in ("vanilla", "pipemare"))
    for pipe, other in ((plain, paced), (paced, plain)):
        train(pipe, batches(2))
        save(tmp_path / pipe.method.name, pipe)

        def older(body):
            del body["stages"][0]["scheduler"]["_is_initial"]
            body["stages"][1]["scheduler"]["_of_later"] = 3

        forge(tmp_path / pipe.method.name, older)
        load(tmp_path / pipe.method.name, other)
        train(other, batches(1))


def test_rates_by_delay_are_not_saved(tmp_path):
    """They load into another method and another cut."""
    pipe = pipeline(4, method="pipemare")
    train(pipe, batches(3))
    save(tmp_path / "c", pipe)
    for n, method in ((4, "pipedream"), (2, "pipemare"), (1, "vanilla")):
        other = pipeline(n, seed=1, method=method)
        load(tmp_path / "c", other)
        assert other.minibatches == 3
        assert [o.param_groups[0]["lr"] for o in other.optimizers] == [0.025] * n
        train(other, batches(1))


@pytest.fixture
def trained():
    pipe = pipeline(2, seed=3)
    train(pipe, batches(3))
    return pipe


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: model(blocks=3), r"has no '3\.linear\.weight', which stage 1 has"),
        (lambda: model(blocks=5), r"has '4\..*', which the model has not \(7 such tensors\)"),
        (lambda: nn.Linear(2, 2), "has no '0.linear.weight', which stage 0 has"),
    ],
    ids=["smaller", "larger", "other"],
)
def test_another_model(tmp_path, trained, make, match):
    saved = make()
    save(tmp_path / "c", saved)
    untouched(trained, lambda: load(tmp_path / "c", trained), CheckpointError, match)


def test_another_shape(tmp_path, trained):
    saved = model()
    saved[2].linear = nn.Linear(4, 5)
    save(tmp_path / "c", saved)
    match = r"'2\.linear\.weight' has shape \[5, 4\], expected \[4, 4\]"
    untouched(trained, lambda: load(tmp_path / "c", trained), CheckpointError, match)


def test_a_failure_in_the_middle_is_undone(tmp_path, trained):
    sampler = ShuffledSampler(10, 3)
    save(tmp_path / "c", pipeline(2), sampler=sampler)
    other = ShuffledSampler(11, 3)
    untouched(
        trained,
        lambda: load(tmp_path / "c", trained, sampler=other),
        CheckpointError,
        "does not fit the sampler: samples: expected 11, got 10",
    )
    assert other.position == 0


def test_refused_while_a_run_is_under_way(tmp_path, trained):
    save(tmp_path / "c", pipeline(2))
    run = trained.run(batches(3))
    next(run)
    with pytest.raises(RuntimeError, match="a run of this pipeline has not ended"):
        save(tmp_path / "d", trained)
    with pytest.raises(RuntimeError, match="a run of this pipeline has not ended"):
        load(tmp_path / "c", trained)
    run.close()
    assert not (tmp_path / "d").exists()


def test_bad_arguments(tmp_path, trained):
    with pytest.raises(ValueError, match="optimizer, scheduler: a pipeline has its own"):
        save(tmp_path / "c", trained, optimizer=trained.optimizers[0])
    with pytest.raises(TypeError, match=r"extra\.a\[1\]: a checkpoint cannot hold a builtins\.set"):
        save(tmp_path / "c", trained, extra={"a": [1, {2}]})
    assert not list(tmp_path.iterdir())
    save(tmp_path / "c", trained)
    with pytest.raises(FileExistsError, match=r"path: .* exists; overwrite=True replaces it"):
        save(tmp_path / "c", trained)
    save(tmp_path / "c", trained, overwrite=True, minibatches=8)
    assert load(tmp_path / "c", trained).minibatches == 8
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_module_with_state_that_is_no_tensor(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"x": 1}

    with pytest.raises(TypeError, match="'_extra_state' in its state_dict is a dict"):
        save(tmp_path / "c", Extra(1, 1))


def test_the_document_is_json_for_people(tmp_path):
    save(tmp_path / "c", pipeline(2), minibatches=3)
    body = json.loads((tmp_path / "c" / "checkpoint.json").read_text())["checkpoint"]
    assert body["minibatches"] == 3
    assert body["version"] == 2
    assert [stage["stage"] for stage in body["stages"]] == [0, 1]
    assert body["stages"][0]["optimizer"]["groups"][0]["options"]["momentum"] == 0.9
    assert body["tensors"]["model.2.linear.weight"]["shape"] == [4, 4]


def test_the_generator_of_a_device_is_found_again():
    process = {device: {"$tensor": device} for device in ("cpu", "cuda0")}
    entries = {key: {"dtype": "uint8", "shape": [16]} for key in process}
    body = {"stages": [], "replicas": [], "processes": [{"random": process}], "tensors": entries}
    generators = Generators([], 0, 1)
    assert generators.match(body) == {"stages": [], "process": process}
    assert generators.all_found
    process["process1"] = {"$tensor": "cpu"}
    assert generators.match(body) == {}


def test_a_corrections_average_keeps_its_dtype_where_nothing_is_corrected(tmp_path):
    def made(method, seed=0):
        stages = cut_at(model(seed).bfloat16(), [2, 4])
        return st.Pipeline(stages, sgd, LOSS, method, master_dtype=torch.float32)

    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(7)]
    kept, plain, back = made("gap-aware"), made("sync", 1), made("gap-aware", 2)
    train(kept, data[:4])
    save(tmp_path / "a", kept)
    load(tmp_path / "a", plain)
    save(tmp_path / "b", plain)
    load(tmp_path / "b", back)
    states = everything(kept), everything(back)
    averages = [{k: v for k, v in state.items() if "gap_average" in k} for state in states]
    assert len(averages[0]) == 8  # the last stage is not late
    assert {average.dtype for average in averages[0].values()} == {torch.float32}
    same(averages[1], averages[0])
    assert train(back, data[4:]) == train(kept, data[4:])


def test_state_of_parameters_that_are_frozen_now(tmp_path):
    kept, other = pipeline(2), model(seed=1)
    train(kept, batches(2))
    save(tmp_path / "c", kept)
    other[0].requires_grad_(False)
    other[3].linear.bias.requires_grad_(False)
    stages = cut_at(other, [1, 4])
    pipe = st.Pipeline(stages, sgd, LOSS, "spectrain", scheduler=halving)
    with pytest.warns(UserWarning) as warned:
        load(tmp_path / "c", pipe)
    assert [str(each.message).partition(" is not loaded")[0] for each in warned] == [
        "stage 0: the optimizer state of 0.linear.weight, 0.linear.bias, 0.norm.weight and 1 more",
        "stage 1: the optimizer state of 3.linear.bias",
    ]
    pipe.release()
    load(tmp_path / "c", other)  # without an optimizer


class Quantized(nn.Module):
    """Gives its frozen weight with a scale under another name, as layers of bitsandbytes do."""

    takes_back = False

    def __init__(self, seed):
        super().__init__()
        dense = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.scale = dense.abs().max() / 127
        packed = (dense / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x @ (self.weight * self.scale) + self.bias

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.scale"] = self.scale

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if self.takes_back:
            self.scale = state_dict.pop(prefix + "weight.scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Restored(Quantized):
    takes_back = True


def quantized(n, kind=Quantized, seed=0):
    torch.manual_seed(seed)
    blocks = [layer for k in range(3) for layer in (kind(k), nn.Linear(4, 4), nn.Tanh())]
    return st.Pipeline(cut_at(nn.Sequential(*blocks), ends(9, n)), adamw, LOSS, "sync")


def test_frozen_weights_that_a_module_refuses_to_load(tmp_path):
    kept = quantized(3)
    train(kept, batches(2))
    with pytest.warns(UserWarning, match=r"stage 1: 3\.weight, 3\.weight\.scale are not saved"):
        save(tmp_path / "c", kept)
    body = json.loads((tmp_path / "c" / NAME).read_text())["checkpoint"]
    assert [stage["left_out"] for stage in body["stages"]] == [
        [f"{k}.weight", f"{k}.weight.scale"] for k in (0, 3, 6)
    ]
    expected = train(kept, batches(2, seed=1))
    for n in (3, 2):
        other = quantized(n, seed=9)
        with pytest.warns(UserWarning, match=r"stage 0: 0\.weight, .* keep their present values"):
            load(tmp_path / "c", other)
        assert train(other, batches(2, seed=1)) == expected


@pytest.mark.parametrize("takes_back", [False, True])
def test_packed_weights_that_are_saved(tmp_path, monkeypatch, takes_back):
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


def test_trained_weights_that_a_module_refuses_to_load(tmp_path):
    class Scaled(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "scale"] = torch.ones(())

    model = nn.Sequential(nn.Linear(4, 4), Scaled(4, 4))
    with pytest.raises(TypeError, match=r"Scaled refuses to load '1\.scale'.* trained"):
        save(tmp_path / "c", model)
    assert not (tmp_path / "c").exists()
