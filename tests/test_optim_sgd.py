"""optim.SGD: torch.optim.SGD's results, state and protocol, and predictions of the weights."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spectrain_ext as st

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Over a score of steps: rounding once (here) against rounding after every operation (torch).
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.bfloat16: {"rtol": 6e-2, "atol": 6e-2},
    torch.float16: {"rtol": 8e-3, "atol": 8e-3},
}
OPTIONS = [
    {
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    for momentum, dampening, weight_decay, nesterov, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (0.0, 0.02), (False, True), (False, True)
    )
    if not nesterov or (momentum > 0 and dampening == 0)
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def make_params(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Parameters of many layouts: plain, scalar, empty, channels_last, transposed, odd sizes."""
    tensors = [
        torch.randn(7, 5, dtype=dtype),
        torch.randn((), dtype=dtype),
        torch.empty(0, 3, dtype=dtype),
        torch.randn(4, 3, 5, 5, dtype=dtype).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 6, dtype=dtype).t(),
        torch.randn(1031, dtype=dtype),
    ]
    return [nn.Parameter(t) for t in tensors]


def twins(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def give_gradients(*lists: Sequence[nn.Parameter], none: Sequence[int] = ()) -> None:
    """Give corresponding parameters of every list the same new random gradient, or None."""
    for row, same in enumerate(zip(*lists, strict=True)):
        grad = torch.randn_like(same[0]) * 0.3
        for p in same:
            p.grad = None if row in none else grad.clone()


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.detach(), b.detach(), **TOLERANCE[a.dtype])


def bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def assert_bits(tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    for a, b in zip(tensors, kept, strict=True):
        assert torch.equal(a.detach(), b)


def momenta(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[Any]:
    return [optimizer.state.get(p, {}).get("momentum_buffer") for p in params]


def trained(
    dtype: torch.dtype = torch.float64, steps: int = 3, **options: Any
) -> tuple[list[nn.Parameter], st.optim.SGD]:
    params = make_params(dtype)
    optimizer = st.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})
    for _ in range(steps):
        give_gradients(params)
        optimizer.step()
    return params, optimizer


# --- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(map(str, o.values())))
def test_many_steps_match_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = make_params(dtype)
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.05, **options)
    reference = torch.optim.SGD(theirs, lr=0.05, foreach=False, **options)
    for step in range(20):
        # Parameter 5 gets its first gradient late, parameter 0 misses some.
        none = [5] if step < 4 else [0] if step % 3 == 0 else []
        give_gradients(ours, theirs, none=none)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    buffers, expected = momenta(optimizer, ours), momenta(reference, theirs)
    if options["momentum"]:
        assert_same(buffers, expected)
    else:
        assert buffers == expected == [None] * len(ours)


def test_multiple_groups_have_their_own_options() -> None:
    ours = make_params()
    theirs = twins(ours)

    def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "lr": 0.3, "momentum": 0.0},
            {"params": params[2:4], "weight_decay": 0.1, "nesterov": True},
            {"params": params[4:], "dampening": 0.5, "maximize": True},
        ]

    optimizer = st.optim.SGD(groups(ours), lr=0.02, momentum=0.8)
    reference = torch.optim.SGD(groups(theirs), lr=0.02, momentum=0.8)
    for _ in range(10):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()


def test_one_group_may_mix_dtypes() -> None:
    ours = [nn.Parameter(torch.randn(9, dtype=dtype)) for dtype in DTYPES]
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, foreach=False)
    for _ in range(5):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_real_training_matches_torch() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()
    model = model.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    optimizer = st.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    reference = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for _ in range(10):
        x, target = torch.randn(6, 1, 6, 6).double(), torch.randint(3, (6,))
        for net, opt in ((model, optimizer), (twin, reference)):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), target).backward()
            opt.step()
    assert_same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_float32_momentum_of_16_bit_weights(dtype: torch.dtype) -> None:
    params = make_params(dtype)
    optimizer = st.optim.SGD(params, lr=0.01, momentum=0.9, momentum_dtype=torch.float32)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
    for _ in range(20):
        give_gradients(params)
        for v, p in zip(exact, params, strict=True):
            v.mul_(0.9).add_(p.grad.double())
        optimizer.step()
    for v, buffer in zip(exact, momenta(optimizer, params), strict=True):
        assert buffer.dtype == torch.float32
        torch.testing.assert_close(buffer.double(), v, rtol=1e-5, atol=1e-5)


def test_no_gradient_no_change_and_no_state() -> None:
    params = make_params()
    optimizer = st.optim.SGD(params, lr=0.1, momentum=0.9)
    kept = bits(params)
    optimizer.step()
    assert_bits(params, kept)
    assert not optimizer.state


@pytest.mark.parametrize("set_to_none", (True, False))
def test_zero_grad(set_to_none: bool) -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for _ in range(4):
        for opt, params in ((optimizer, ours), (reference, theirs)):
            opt.zero_grad(set_to_none=set_to_none)
            sum((p * p).sum() for p in params).backward()
            opt.step()
    assert_same(ours, theirs)


def test_a_step_keeps_no_gradient_alive() -> None:
    params, optimizer = trained()
    give_gradients(params)
    grad = weakref.ref(params[0].grad)
    optimizer.step()
    optimizer.zero_grad()
    assert grad() is None


def test_dropping_the_optimizer_frees_its_memory_without_the_collector() -> None:
    params, optimizer = trained()
    with optimizer.predicted(1.0):
        pass
    buffer = weakref.ref(optimizer.state[params[0]]["momentum_buffer"])
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert buffer() is None
    finally:
        gc.enable()


# --- gradients and parameters of other kinds -----------------------------------------------------


def test_gradients_of_another_layout() -> None:
    ours = [
        nn.Parameter(torch.randn(4, 3, 5, 5).double()),
        nn.Parameter(torch.randn(6, 4).double()),
    ]
    ours.append(nn.Parameter(torch.randn(3, 2).double()))
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for _ in range(3):
        grads = [
            torch.randn(4, 3, 5, 5).double().contiguous(memory_format=torch.channels_last),
            torch.randn(4, 6).double().t(),
            torch.randn(1, 1).double().expand(3, 2),
        ]
        for params in (ours, theirs):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_gradients_that_carry_a_graph() -> None:
    p = nn.Parameter(torch.randn(5).double())
    q = nn.Parameter(p.detach().clone())
    for param, opt in (
        (p, st.optim.SGD([p], lr=0.1, momentum=0.9)),
        (q, torch.optim.SGD([q], lr=0.1, momentum=0.9)),
    ):
        (param**3).sum().backward(create_graph=True)
        opt.step()
        param.grad = None
    assert_same([p], [q])


def test_sparse_gradients_are_refused_and_nothing_changes() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    other = nn.Parameter(torch.randn(4))
    optimizer = st.optim.SGD(
        [{"params": [other]}, {"params": embedding.parameters()}], lr=0.1, momentum=0.9
    )
    (embedding(torch.tensor([1, 2])).sum() + other.sum()).backward()
    kept = bits([other, embedding.weight])
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 1 is sparse"):
        optimizer.step()
    assert_bits([other, embedding.weight], kept)
    assert not optimizer.state


def test_parameters_that_move_between_steps() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for step in range(6):
        if step in (2, 4):
            for p in ours:
                p.data = p.data.clone()
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_a_module_that_changes_dtype_between_steps() -> None:
    model = nn.Linear(5, 3)
    optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model.to(dtype)
        before = bits(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert all((a < b).all() for a, b in zip(model.parameters(), before, strict=True))
        for buffer in momenta(optimizer, list(model.parameters())):
            assert buffer.dtype in (dtype, torch.float32)


def test_momentum_that_the_caller_replaces_is_used() -> None:
    params, optimizer = trained()
    optimizer.state[params[0]]["momentum_buffer"] = torch.zeros_like(params[0])
    optimizer.state[params[3]]["momentum_buffer"].data = torch.zeros(4, 3, 5, 5).double()
    del optimizer.state[params[5]]
    kept = bits(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    changed = [not torch.equal(p, k) for p, k in zip(params, kept, strict=True)]
    assert changed == [False, True, False, False, True, False]


# --- protocol of torch.optim ---------------------------------------------------------------------


def test_it_is_a_torch_optimizer_with_the_same_groups() -> None:
    params = make_params()
    optimizer = st.optim.SGD(params, lr=0.1)
    reference = torch.optim.SGD(twins(params), lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults == reference.defaults
    assert optimizer.state_dict() == reference.state_dict()
    assert optimizer.param_groups[0].keys() == reference.param_groups[0].keys()
    assert repr(optimizer) == repr(reference)


@pytest.mark.parametrize("flag", ({"foreach": True}, {"fused": True}, {"foreach": False}))
def test_implementation_flags_have_no_effect(flag: dict[str, bool]) -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9, **flag)
    reference = st.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_bits(ours, bits(theirs))


def test_a_gradient_scaler_skips_the_step_on_overflow() -> None:
    # torch's fused optimizers skip inside of step(); this one must let the scaler do it.
    p = nn.Parameter(torch.ones(4))
    optimizer = st.optim.SGD([p], lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((p * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_bits([p], [torch.ones(4)])
    optimizer.zero_grad()
    scaler.scale((p * 2).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.8))


@pytest.mark.parametrize("as_tensor", (False, True))
@pytest.mark.parametrize("kind", ("step", "one_cycle", "cyclic", "lambda"))
def test_schedulers(kind: str, as_tensor: bool) -> None:
    ours = make_params()
    theirs = twins(ours)

    def lr() -> Any:
        return torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1

    optimizer = st.optim.SGD(ours, lr=lr(), momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=lr(), momentum=0.9)

    def scheduler(opt: torch.optim.Optimizer) -> Any:
        from torch.optim import lr_scheduler as s

        if kind == "step":
            return s.StepLR(opt, step_size=3, gamma=0.5)
        if kind == "one_cycle":
            return s.OneCycleLR(opt, max_lr=0.2, total_steps=15)
        if kind == "cyclic":
            return s.CyclicLR(opt, base_lr=0.01, max_lr=0.2, step_size_up=4)
        return s.LambdaLR(opt, lambda epoch: 0.9**epoch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules = [scheduler(optimizer), scheduler(reference)]
        for _ in range(12):
            give_gradients(ours, theirs)
            optimizer.step()
            reference.step()
            for schedule in schedules:
                schedule.step()
            assert optimizer.param_groups[0]["momentum"] == reference.param_groups[0]["momentum"]
    if kind in ("one_cycle", "cyclic"):
        assert optimizer.param_groups[0]["momentum"] != 0.9
    assert_same(ours, theirs)


def test_momentum_switched_off_and_on_again() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for momentum in (0.9, 0.9, 0.0, 0.0, 0.5, 0.5):
        optimizer.param_groups[0]["momentum"] = reference.param_groups[0]["momentum"] = momentum
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert_same(momenta(optimizer, ours), momenta(reference, theirs))


def test_step_hooks_run_around_the_step_and_can_clip() -> None:
    params = [nn.Parameter(torch.zeros(4))]
    optimizer = st.optim.SGD(params, lr=1.0, momentum=0.9)
    order: list[str] = []

    def clip(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        order.append("pre")
        nn.utils.clip_grad_norm_(params, 1.0)

    optimizer.register_step_pre_hook(clip)
    handle = optimizer.register_step_post_hook(lambda *_: order.append("post"))
    params[0].grad = torch.full((4,), 50.0)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.full((4,), -0.5), rtol=1e-5, atol=0)
    handle.remove()
    optimizer.step()
    assert order == ["pre", "post", "pre"]


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = st.optim.SGD([p], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 3.0
    assert_bits([p], [torch.zeros(3)])


def test_add_param_group_after_some_steps() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours[:2], lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs[:2], lr=0.1, momentum=0.9)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": ours[2:], "lr": 0.01})
            reference.add_param_group({"params": theirs[2:], "lr": 0.01})
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_named_parameters() -> None:
    model = nn.Linear(3, 2)
    optimizer = st.optim.SGD(model.named_parameters(), lr=0.1)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_backward_after_an_in_between_step_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    early = model(torch.randn(3, 4)).sum()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_only_parameters_with_a_gradient_count_as_modified() -> None:
    params, optimizer = trained()
    give_gradients(params, none=[1])
    versions = [p._version for p in params]
    optimizer.step()
    changed = [p._version > before for p, before in zip(params, versions, strict=True)]
    assert changed == [True, False, True, True, True, True]


# --- checkpoints ---------------------------------------------------------------------------------


def saved_and_loaded(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("direction", ("from torch", "to torch", "same"))
def test_checkpoints_load_in_both_directions(direction: str) -> None:
    ours, theirs = make_params(), make_params()
    first_class = torch.optim.SGD if direction == "from torch" else st.optim.SGD
    second_class = torch.optim.SGD if direction == "to torch" else st.optim.SGD
    first = first_class(ours, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        give_gradients(ours, none=[1])
        first.step()
    theirs = twins(ours)
    second = second_class(theirs, lr=9.0, momentum=0.1)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    assert second.param_groups[0]["lr"] == 0.1
    for _ in range(3):
        give_gradients(ours, theirs)
        first.step()
        second.step()
    assert_same(ours, theirs)
    assert_same(momenta(first, ours), momenta(second, theirs))


def test_loading_over_existing_state_and_missing_state() -> None:
    ours, optimizer = trained()
    fresh = st.optim.SGD(make_params(), lr=0.5, momentum=0.9).state_dict()
    optimizer.load_state_dict(fresh)
    assert momenta(optimizer, ours) == [None] * len(ours)
    theirs = twins(ours)
    reference = torch.optim.SGD(theirs, lr=0.5, momentum=0.9)
    for _ in range(2):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_loaded_momentum_is_independent_of_the_checkpoint() -> None:
    params, optimizer = trained()
    state_dict = optimizer.state_dict()
    other_params = twins(params)
    other = st.optim.SGD(other_params, lr=0.1, momentum=0.9)
    other.load_state_dict(state_dict)
    kept = bits(momenta(optimizer, params))
    give_gradients(other_params)
    other.step()
    assert_bits(momenta(optimizer, params), kept)


@pytest.mark.parametrize("how", ("state_dict", "deepcopy", "pickle"))
@pytest.mark.parametrize("asked", (None, torch.float32))
def test_float32_momentum_stays_float32(how: str, asked: torch.dtype | None) -> None:
    params, optimizer = trained(torch.bfloat16, momentum_dtype=torch.float32)
    kept = bits(momenta(optimizer, params))
    if how == "state_dict":
        copied = st.optim.SGD(make_params(torch.bfloat16), momentum=0.9, momentum_dtype=asked)
        copied.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    elif how == "deepcopy":
        copied = copy.deepcopy(optimizer)
    else:
        copied = pickle.loads(pickle.dumps(optimizer))
    copies = copied.param_groups[0]["params"]
    assert {b.dtype for b in momenta(copied, copies)} == {torch.float32}
    assert_bits(momenta(copied, copies), kept)
    give_gradients(params, copies) if how != "state_dict" else give_gradients(copies)
    optimizer.step()
    copied.step()
    assert {b.dtype for b in momenta(copied, copies)} == {torch.float32}
    if how != "state_dict":
        assert_bits(copies, bits(params))


def test_loading_casts_what_must_be_cast() -> None:
    def loaded(saved: torch.dtype, dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
        state_dict = trained(saved)[1].state_dict()
        params = make_params(dtype)
        optimizer = st.optim.SGD(params, momentum=0.9, momentum_dtype=asked)
        optimizer.load_state_dict(state_dict)
        (found,) = {b.dtype for b in momenta(optimizer, params)}
        give_gradients(params)
        optimizer.step()
        return found

    assert loaded(torch.bfloat16, torch.bfloat16, torch.float32) == torch.float32
    assert loaded(torch.float32, torch.bfloat16, torch.bfloat16) == torch.bfloat16
    assert loaded(torch.float32, torch.float16, None) == torch.float32
    assert loaded(torch.float32, torch.float64, None) == torch.float64
    assert loaded(torch.float64, torch.bfloat16, None) == torch.bfloat16
    assert loaded(torch.float16, torch.bfloat16, None) == torch.bfloat16


def test_loaded_momentum_takes_the_layout_of_the_parameter() -> None:
    weight = torch.randn(4, 3, 5, 5).double()
    plain = nn.Parameter(weight.clone())
    nhwc = nn.Parameter(weight.clone(memory_format=torch.channels_last))
    first = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    plain.grad = torch.randn_like(plain)
    first.step()
    second = st.optim.SGD([nhwc], lr=0.1, momentum=0.9)
    with torch.no_grad():
        nhwc.copy_(plain)
    second.load_state_dict(first.state_dict())
    assert nhwc.is_contiguous(memory_format=torch.channels_last)
    plain.grad = torch.randn_like(plain)
    nhwc.grad = plain.grad.clone(memory_format=torch.channels_last)
    first.step()
    second.step()
    assert_same([nhwc], [plain])


def test_load_state_dict_hooks_run() -> None:
    _, optimizer = trained()
    other = st.optim.SGD(make_params(), lr=0.1, momentum=0.9)
    seen: list[Any] = []

    def pre(opt: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state_dict)
        state["state"][0]["momentum_buffer"].fill_(5.0)
        return state

    other.register_load_state_dict_pre_hook(pre)
    other.register_load_state_dict_post_hook(
        lambda opt: seen.append(opt.state[opt.param_groups[0]["params"][0]]["momentum_buffer"])
    )
    for _ in range(2):
        other.load_state_dict(optimizer.state_dict())
    assert len(seen) == 2
    assert (seen[0] == 5.0).all()


@pytest.mark.parametrize("wrong", ("shape", "groups", "lr", "differentiable", "type"))
def test_a_state_dict_that_does_not_fit_changes_nothing(wrong: str) -> None:
    params, optimizer = trained()
    state_dict = copy.deepcopy(optimizer.state_dict())
    if wrong == "shape":
        state_dict["state"][5]["momentum_buffer"] = torch.zeros(3)
    elif wrong == "groups":
        state_dict["param_groups"].append(state_dict["param_groups"][0])
    elif wrong == "lr":
        state_dict["param_groups"][0]["lr"] = float("nan")
    elif wrong == "differentiable":
        state_dict["param_groups"][0]["differentiable"] = True
    else:
        state_dict["state"][0]["momentum_buffer"] = "momentum"
    state_dict["state"][1]["momentum_buffer"] = torch.tensor(7.0)
    kept, groups = bits(momenta(optimizer, params)), copy.copy(optimizer.param_groups[0])
    with pytest.raises((ValueError, TypeError)):
        optimizer.load_state_dict(state_dict)
    assert_bits(momenta(optimizer, params), kept)
    assert optimizer.param_groups[0].items() == groups.items()
    assert not optimizer._optimizer_load_state_dict_pre_hooks


@pytest.mark.parametrize("how", (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))))
def test_copies_go_on_alike(how: Any) -> None:
    params, optimizer = trained()
    copied = how(optimizer)
    copies = copied.param_groups[0]["params"]
    for _ in range(3):
        give_gradients(params, copies)
        optimizer.step()
        copied.step()
    assert_bits(copies, bits(params))


def test_a_pickle_of_a_model_and_its_optimizer_stays_connected() -> None:
    model = nn.Linear(3, 2)
    optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    model_copy(torch.randn(4, 3)).sum().backward()
    kept = bits(model_copy.parameters())
    optimizer_copy.step()
    assert not torch.equal(model_copy.weight, kept[0])


# --- prediction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", (0, 1, 2.5))
def test_predict_and_restore(dtype: torch.dtype, steps: float) -> None:
    params, optimizer = trained(dtype)
    kept = bits(params)
    optimizer.predict_(steps)
    for p, w, v in zip(params, kept, momenta(optimizer, params), strict=True):
        exact = w.double() - 0.1 * steps * v.double()
        torch.testing.assert_close(p.detach().double(), exact, **TOLERANCE[dtype])
        if steps == 0:
            assert torch.equal(p.detach(), w)
    optimizer.restore_()
    assert_bits(params, kept)


def test_prediction_uses_each_groups_current_learning_rate() -> None:
    params = make_params()
    optimizer = st.optim.SGD(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.1, momentum=0.9
    )
    give_gradients(params)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.03, dtype=torch.float64)
    kept = bits(params)
    with optimizer.predicted(3):
        for row, (p, w) in enumerate(zip(params, kept, strict=True)):
            v = optimizer.state[p]["momentum_buffer"]
            lr = 0.03 if row < 2 else 0.5
            torch.testing.assert_close(p.detach(), w - lr * 3 * v, rtol=1e-13, atol=1e-15)
    assert_bits(params, kept)


def test_without_momentum_yet_the_prediction_is_the_weights() -> None:
    params = make_params()
    optimizer = st.optim.SGD(params, lr=0.1, momentum=0.9)
    kept = bits(params)
    with optimizer.predicted(4.0):
        assert_bits(params, kept)
    give_gradients(params, none=[0, 4])
    optimizer.step()
    kept = bits(params)
    with optimizer.predicted(4.0):
        same = [torch.equal(p.detach(), k) for p, k in zip(params, kept, strict=True)]
        assert same == [True, False, True, False, True, False]
    assert_bits(params, kept)


def test_gradients_inside_the_context_are_those_at_the_predicted_weights() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    params = list(model.parameters())
    optimizer = st.optim.SGD(params, lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 5).double()).square().mean().backward()
        optimizer.step()
    kept = bits(params)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(params, twin.parameters(), strict=True):
            q.sub_(optimizer.state[p]["momentum_buffer"], alpha=0.1 * 2)
    x = torch.randn(4, 5).double()
    optimizer.zero_grad()
    with optimizer.predicted(2):
        model(x).square().mean().backward()
    twin(x).square().mean().backward()
    assert_same([p.grad for p in params], [q.grad for q in twin.parameters()])
    assert_bits(params, kept)
    optimizer.step()
    assert not torch.equal(params[0], kept[0])


def test_the_context_restores_after_an_exception() -> None:
    params, optimizer = trained()
    kept = bits(params)
    with pytest.raises(ZeroDivisionError), optimizer.predicted(2):
        raise ZeroDivisionError
    assert_bits(params, kept)
    optimizer.step()


def test_a_backward_across_predict_or_restore_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    before = model(torch.randn(3, 4)).sum()
    with optimizer.predicted(1):
        inside = model(torch.randn(3, 4)).sum()
        with pytest.raises(RuntimeError, match="inplace"):
            before.backward()
    with pytest.raises(RuntimeError, match="inplace"):
        inside.backward()


def test_a_prediction_follows_new_momentum_and_moved_parameters() -> None:
    params, optimizer = trained()
    with optimizer.predicted(1):
        pass
    give_gradients(params)
    optimizer.step()
    for p in params:
        p.data = p.data.clone()
    optimizer.state[params[0]]["momentum_buffer"] = torch.ones(7, 5).double()
    kept = bits(params)
    with optimizer.predicted(1):
        for p, w in zip(params, kept, strict=True):
            v = optimizer.state[p]["momentum_buffer"]
            torch.testing.assert_close(p.detach(), w - 0.1 * v, rtol=1e-13, atol=1e-15)
    assert_bits(params, kept)


def test_restore_reaches_parameters_that_moved_meanwhile() -> None:
    params, optimizer = trained()
    kept = bits(params)
    optimizer.predict_(2)
    for p in params:
        p.data = p.data.clone()
    optimizer.restore_()
    assert_bits(params, kept)


def test_misuse_of_prediction_raises_and_changes_nothing() -> None:
    params, optimizer = trained()
    with pytest.raises(RuntimeError, match="predict_ first"):
        optimizer.restore_()
    kept = bits(params)
    optimizer.predict_(2)
    predicted, buffers = bits(params), bits(momenta(optimizer, params))
    state_dict = optimizer.state_dict()
    give_gradients(params)
    for misuse in (
        lambda: optimizer.predict_(1),
        lambda: optimizer.step(),
        lambda: optimizer.load_state_dict(state_dict),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer),
        lambda: optimizer.bind(None, {p: torch.empty_like(p) for p in params}),
    ):
        with pytest.raises(RuntimeError, match="predicted"):
            misuse()
        assert_bits(params, predicted)
        assert_bits(momenta(optimizer, params), buffers)
        assert len(optimizer.param_groups) == 1
    optimizer.restore_()
    assert_bits(params, kept)
    optimizer.step()


@pytest.mark.parametrize("steps", (-1, float("nan"), float("inf"), -1e-9))
def test_bad_steps(steps: float) -> None:
    params, optimizer = trained()
    kept = bits(params)
    with pytest.raises(ValueError, match="steps"):
        optimizer.predict_(steps)
    assert_bits(params, kept)
    with pytest.raises(RuntimeError):
        optimizer.restore_()


def test_prediction_needs_momentum_in_every_group() -> None:
    params = make_params()
    optimizer = st.optim.SGD(
        [{"params": params[:2]}, {"params": params[2:], "momentum": 0}], lr=0.1, momentum=0.9
    )
    give_gradients(params)
    optimizer.step()
    kept = bits(params)
    for predict in (optimizer.predict_, lambda s: optimizer.predicted(s).__enter__()):
        with pytest.raises(ValueError, match="group 1 has momentum 0"):
            predict(1)
    assert_bits(params, kept)
    with pytest.raises(ValueError, match="group 1"):
        optimizer.check_can_predict()
    optimizer.param_groups[1]["momentum"] = 0.5
    optimizer.check_can_predict()


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    (
        {"lr": -0.1},
        {"lr": float("nan")},
        {"lr": torch.tensor([0.1, 0.2])},
        {"momentum": -0.5},
        {"momentum": float("nan")},
        {"weight_decay": -1.0},
        {"weight_decay": float("nan")},
        {"dampening": float("nan")},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        {"differentiable": True},
    ),
    ids=str,
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        st.optim.SGD(make_params(), **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("dtype", "momentum_dtype"),
    (
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.complex64, None),
    ),
    ids=str,
)
def test_bad_dtypes(dtype: torch.dtype, momentum_dtype: torch.dtype | None) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=dtype))]
    if dtype != torch.float32:
        momentum_ok = momentum_dtype in (None, torch.float32)
        bad = 1 if momentum_ok else 0
    else:
        bad = 0
    with pytest.raises(TypeError, match=f"parameter {bad} of group 0"):
        st.optim.SGD(params, lr=0.1, momentum=0.9, momentum_dtype=momentum_dtype)


def test_duplicate_parameters() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="parameter 2 of group 0 is parameter 0"):
            st.optim.SGD([p, q, p], lr=0.1)
    with pytest.raises(ValueError):
        st.optim.SGD([{"params": [p]}, {"params": [q, p]}], lr=0.1)


def test_a_bad_group_is_not_added() -> None:
    params, optimizer = trained()
    new = nn.Parameter(torch.ones(2).double())
    for bad in ({"params": [new], "lr": -1.0}, {"params": [new], "differentiable": True}):
        with pytest.raises(ValueError, match="group 1"):
            optimizer.add_param_group(bad)
    with pytest.raises(TypeError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.cfloat))]})
    assert len(optimizer.param_groups) == 1
    give_gradients(params)
    optimizer.step()


@pytest.mark.parametrize(
    ("key", "value"),
    (
        ("lr", -0.1),
        ("lr", float("nan")),
        ("lr", torch.ones(2)),
        ("momentum", -1.0),
        ("weight_decay", float("nan")),
        ("differentiable", True),
        ("lr", "fast"),
    ),
)
def test_numbers_that_go_bad_later_change_nothing(key: str, value: Any) -> None:
    params = make_params()
    optimizer = st.optim.SGD([{"params": params[:3]}, {"params": params[3:]}], lr=0.1, momentum=0.9)
    give_gradients(params)
    optimizer.step()
    optimizer.param_groups[1][key] = value
    kept, buffers = bits(params), bits(momenta(optimizer, params))
    give_gradients(params)
    with pytest.raises((ValueError, TypeError), match="group 1"):
        optimizer.step()
    assert_bits(params, kept)
    assert_bits(momenta(optimizer, params), buffers)


# --- the binding to a pipeline's buffers ---------------------------------------------------------


class Bound:
    """An optimizer bound to flat buffers, beside an ordinary one with the same weights."""

    def __init__(self, master: bool, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        options = {"lr": 0.1, "momentum": 0.9, **options}
        self.params = make_params(dtype)
        self.twins = twins(self.params)
        self.optimizer = st.optim.SGD(self.params, **options)
        self.reference = st.optim.SGD(self.twins, **options)
        self.master = self.flat(copy_weights=True) if master else None
        self.momentum = self.flat()
        self.outs = self.flat()

    def flat(self, copy_weights: bool = False) -> dict[Tensor, Tensor]:
        """Views of one buffer with NaN between them, in the parameters' layouts."""
        dtype = self.params[0].dtype
        starts = list(itertools.accumulate((p.numel() + 3 for p in self.params), initial=1))
        buffer = torch.full((starts[-1],), float("nan"), dtype=dtype)
        views = {
            p: buffer.as_strided(p.shape, p.stride(), start)
            for p, start in zip(self.params, starts, strict=False)
        }
        if copy_weights:
            for p, view in views.items():
                view.copy_(p.detach())
        return views

    def bind(self) -> None:
        self.optimizer.bind(self.master, self.momentum)

    @property
    def weights(self) -> list[Tensor]:
        return [p if self.master is None else self.master[p] for p in self.params]

    def step(self, none: Sequence[int] = ()) -> None:
        give_gradients(self.params, self.twins, none=none)
        self.optimizer.step()
        self.reference.step()

    def assert_equal(self) -> None:
        assert_bits(self.weights, bits(self.twins))
        for p, q in zip(self.params, self.twins, strict=True):
            ours = self.optimizer.state.get(p, {}).get("momentum_buffer")
            theirs = self.reference.state.get(q, {}).get("momentum_buffer")
            if theirs is None:
                assert ours is None
                assert (self.momentum[p] == 0).all()
            else:
                assert ours is self.momentum[p]
                assert torch.equal(ours, theirs)


@pytest.fixture(params=(True, False), ids=("master", "in place"))
def master(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


def test_bound_steps_equal_unbound_steps(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    for step in range(5):
        pair.step(none=[0, 5] if step < 2 else [1])
        pair.assert_equal()


def test_binding_takes_the_momentum_along_and_unbinding_gives_it_back(master: bool) -> None:
    pair = Bound(master)
    for _ in range(2):
        give_gradients(pair.params, pair.twins, none=[3])
        pair.optimizer.step()
        pair.reference.step()
    if pair.master is not None:
        for p, view in pair.master.items():
            view.copy_(p.detach())
    pair.bind()
    pair.assert_equal()
    pair.step()
    pair.assert_equal()
    pair.optimizer.unbind()
    kept = bits([pair.optimizer.state[p]["momentum_buffer"] for p in pair.params])
    for view in pair.momentum.values():
        view.fill_(float("nan"))
    assert_bits(momenta(pair.optimizer, pair.params), kept)
    if pair.master is not None:
        with torch.no_grad():
            for p, view in pair.master.items():
                p.copy_(view)
    pair.master = None
    pair.step()
    assert_bits(pair.params, bits(pair.twins))


def test_bound_steps_leave_version_counters_alone(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    give_gradients(pair.params)
    versions = [p._version for p in pair.params]
    pair.optimizer.step()
    assert [p._version for p in pair.params] == versions


def test_with_a_master_the_parameters_themselves_are_not_written() -> None:
    pair = Bound(master=True)
    pair.bind()
    kept = bits(pair.params)
    pair.step()
    assert_bits(pair.params, kept)


def predictions(pair: Bound, steps: float) -> list[Tensor]:
    """What the outs must hold, to the bit: the module-level operator, row by row."""
    result = []
    for p, w in zip(pair.params, pair.weights, strict=True):
        lr = next(
            float(g["lr"]) for g in pair.optimizer.param_groups if any(p is q for q in g["params"])
        )
        w = w.detach()
        result.append(st.predict(w, pair.momentum[p], lr=lr, steps=steps))
    return result


@pytest.mark.parametrize("steps", (0, 1, 3.5))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_a_sink_is_written_directly_and_with_the_next_step(
    master: bool, steps: float, dtype: torch.dtype
) -> None:
    pair = Bound(master, dtype)
    pair.bind()
    sink = pair.optimizer.prediction_sink(pair.outs)
    sink.write(steps)
    assert_bits(list(pair.outs.values()), bits(pair.weights))
    for none in ([], [0], [], [0, 1, 2, 3, 4, 5], [5], []):
        pair.optimizer.write_with_next_step(sink, steps)
        pair.step(none=none)
        pair.assert_equal()
        assert_bits(list(pair.outs.values()), predictions(pair, steps))
        kept = bits(list(pair.outs.values()))
        sink.write(steps)
        assert_bits(list(pair.outs.values()), kept)
    # consumed: a step without an order leaves the outs alone
    kept = bits(list(pair.outs.values()))
    pair.step()
    pair.assert_equal()
    assert_bits(list(pair.outs.values()), kept)


def test_rows_without_a_gradient_or_a_buffer_are_predicted_too(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    sink = pair.optimizer.prediction_sink(pair.outs)
    pair.optimizer.write_with_next_step(sink, 2)
    pair.step(none=[0, 4])
    assert torch.equal(pair.outs[pair.params[0]], pair.weights[0])
    assert_bits(list(pair.outs.values()), predictions(pair, 2))
    pair.step()
    pair.optimizer.write_with_next_step(sink, 2)
    pair.step(none=[0, 4])
    assert not torch.equal(pair.outs[pair.params[0]], pair.weights[0])
    assert_bits(list(pair.outs.values()), predictions(pair, 2))


def test_sinks_use_the_learning_rate_of_the_moment() -> None:
    pair = Bound(master=True)
    pair.bind()
    pair.step()
    sink = pair.optimizer.prediction_sink(pair.outs)
    pair.optimizer.param_groups[0]["lr"] = 0.7
    sink.write(2)
    assert_bits(list(pair.outs.values()), predictions(pair, 2))


def test_groups_of_a_bound_optimizer() -> None:
    pair = Bound(master=True)
    pair.optimizer = st.optim.SGD(
        [{"params": pair.params[:3]}, {"params": pair.params[3:], "lr": 0.4, "nesterov": True}],
        lr=0.1,
        momentum=0.9,
    )
    pair.reference = st.optim.SGD(
        [{"params": pair.twins[:3]}, {"params": pair.twins[3:], "lr": 0.4, "nesterov": True}],
        lr=0.1,
        momentum=0.9,
    )
    pair.bind()
    sink = pair.optimizer.prediction_sink(pair.outs)
    for _ in range(3):
        pair.optimizer.write_with_next_step(sink, 1.5)
        pair.step()
        pair.assert_equal()
        assert_bits(list(pair.outs.values()), predictions(pair, 1.5))


def test_momentum_zero_can_be_bound_and_copied_but_not_predicted(master: bool) -> None:
    pair = Bound(master, momentum=0.0)
    pair.bind()
    sink = pair.optimizer.prediction_sink(pair.outs)
    pair.optimizer.write_with_next_step(sink, 0)
    pair.step()
    assert_bits(pair.weights, bits(pair.twins))
    assert_bits(list(pair.outs.values()), bits(pair.weights))
    assert not pair.optimizer.state
    kept = bits(list(pair.outs.values()))
    for predict in (sink.write, lambda s: pair.optimizer.write_with_next_step(sink, s)):
        with pytest.raises(ValueError, match="group 0 has momentum 0"):
            predict(1)
    assert_bits(list(pair.outs.values()), kept)


def test_state_dict_of_a_bound_optimizer_is_independent_and_ordinary(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    pair.step(none=[1])
    state_dict = pair.optimizer.state_dict()
    reference = pair.reference.state_dict()
    assert state_dict["param_groups"] == reference["param_groups"]
    assert state_dict["state"].keys() == reference["state"].keys()
    for key, entry in state_dict["state"].items():
        saved = entry["momentum_buffer"]
        assert torch.equal(saved, reference["state"][key]["momentum_buffer"])
        assert saved.untyped_storage().nbytes() == saved.nbytes
    kept = bits([entry["momentum_buffer"] for entry in state_dict["state"].values()])
    pair.step()
    assert_bits([entry["momentum_buffer"] for entry in state_dict["state"].values()], kept)


def test_loading_keeps_the_binding(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    pair.step()
    saved = pair.optimizer.state_dict()
    saved["state"].pop(3)
    pair.step()
    pair.optimizer.load_state_dict(saved)
    pair.reference.load_state_dict(saved)
    pair.assert_equal()
    sink = pair.optimizer.prediction_sink(pair.outs)
    sink.write(2)
    assert_bits(list(pair.outs.values()), predictions(pair, 2))
    for _ in range(2):
        pair.step()
        pair.assert_equal()


@pytest.mark.parametrize("how", (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))))
def test_copies_of_a_bound_optimizer_are_unbound(how: Any) -> None:
    pair = Bound(master=False)
    pair.bind()
    pair.step()
    copied = how(pair.optimizer)
    copies = copied.param_groups[0]["params"]
    for p in copies:
        buffer = copied.state[p]["momentum_buffer"]
        assert buffer.untyped_storage().nbytes() == buffer.nbytes
    with pytest.raises(RuntimeError, match="not bound"):
        copied.unbind()
    give_gradients(pair.params, pair.twins, copies)
    pair.optimizer.step()
    pair.reference.step()
    copied.step()
    pair.assert_equal()
    assert_bits(copies, bits(pair.params))


def test_state_replaced_while_bound_is_adopted() -> None:
    pair = Bound(master=True)
    pair.bind()
    sink = pair.optimizer.prediction_sink(pair.outs)
    pair.step()
    first = pair.params[0]
    new = torch.full_like(first, 3.0).detach()
    pair.optimizer.state[first]["momentum_buffer"] = new
    sink.write(1)
    assert pair.optimizer.state[first]["momentum_buffer"] is pair.momentum[first]
    assert torch.equal(pair.momentum[first], new)
    assert_bits(list(pair.outs.values()), predictions(pair, 1))
    pair.optimizer.state.clear()
    sink.write(1)
    assert_bits(list(pair.outs.values()), bits(pair.weights))


def test_misuse_of_the_binding_raises_and_changes_nothing() -> None:
    pair = Bound(master=True)
    optimizer = pair.optimizer
    with pytest.raises(RuntimeError, match="not bound"):
        optimizer.unbind()
    with pytest.raises(RuntimeError, match="not bound"):
        optimizer.prediction_sink(pair.outs)
    last = pair.params[5]
    short = {p: v for p, v in pair.momentum.items() if p is not last}
    with pytest.raises(ValueError, match="momentum has no tensor for parameter 5 of group 0"):
        optimizer.bind(pair.master, short)
    with pytest.raises(ValueError, match="master has no tensor for parameter 0"):
        optimizer.bind({}, pair.momentum)
    for bad in (torch.zeros(3).double(), torch.zeros(1031).int(), torch.zeros(2062).double()[::2]):
        with pytest.raises(ValueError, match="parameter 5 of group 0"):
            optimizer.bind(pair.master, {**pair.momentum, last: bad})
    assert all(view.isnan().all() for view in pair.momentum.values())

    pair.bind()
    pair.step()
    with pytest.raises(RuntimeError, match="already"):
        pair.bind()
    with pytest.raises(RuntimeError, match="bound"):
        optimizer.predict_(1)
    with pytest.raises(RuntimeError, match="unbind"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="outs has no tensor for parameter 5"):
        optimizer.prediction_sink({p: v for p, v in pair.outs.items() if p is not last})
    with pytest.raises(ValueError, match="outs of parameter 5"):
        optimizer.prediction_sink({**pair.outs, last: torch.zeros(2062).double()[::2]})
    sink = optimizer.prediction_sink(pair.outs)
    for steps in (-1, float("nan")):
        with pytest.raises(ValueError, match="steps"):
            sink.write(steps)
        with pytest.raises(ValueError, match="steps"):
            optimizer.write_with_next_step(sink, steps)
    optimizer.write_with_next_step(sink, 1)
    optimizer.write_with_next_step(None)
    kept = bits(list(pair.outs.values()))
    pair.step()
    assert torch.equal(torch.cat([o.flatten() for o in kept]).isnan(), torch.tensor([True] * 1381))

    optimizer.unbind()
    for use in (sink.write, lambda s: optimizer.write_with_next_step(sink, s)):
        with pytest.raises(RuntimeError, match="not bound"):
            use(1)
    pair.bind()
    for use in (sink.write, lambda s: optimizer.write_with_next_step(sink, s)):
        with pytest.raises(RuntimeError, match="another binding"):
            use(1)


def test_a_failed_step_keeps_the_order_for_the_next() -> None:
    pair = Bound(master=True)
    pair.bind()
    sink = pair.optimizer.prediction_sink(pair.outs)
    pair.optimizer.write_with_next_step(sink, 2)
    pair.optimizer.param_groups[0]["lr"] = -1.0
    give_gradients(pair.params)
    with pytest.raises(ValueError, match="lr"):
        pair.optimizer.step()
    pair.optimizer.param_groups[0]["lr"] = 0.1
    pair.step()
    pair.assert_equal()
    assert_bits(list(pair.outs.values()), predictions(pair, 2))


def test_bound_weights_that_move_are_noticed() -> None:
    pair = Bound(master=False)
    pair.bind()
    pair.step()
    pair.params[0].data = pair.params[0].data.clone()
    kept = bits(pair.params)
    give_gradients(pair.params)
    with pytest.raises(RuntimeError, match="no longer has the storage"):
        pair.optimizer.step()
    assert_bits(pair.params, kept)
