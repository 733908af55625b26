"""Tests optimizers from outside the package, and 16-bit weights with wider masters."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.foreign_optimizers import FOREIGN, PECULIAR, Bare, ByParameter, Replacing, Together
from helpers.pipeline_cases import batches, close, losses, mse, sgd, tanh_stages, torch_sgd
from helpers.random_settings import definition_of, method_of
from oracle.definition import Oracle
from safetensors.torch import load_file
from torch import nn

import spectrain_ext as st
from spectrain_ext.checkpoint import save

pytestmark = pytest.mark.usefixtures("float64")

DIFFERENCE = st.spectrain(law="difference")


def test_the_optimizers_are_the_users_own():
    def halved(opt):
        return torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)

    pipe = st.Pipeline(tanh_stages(2), FOREIGN["Muon"], mse, "lwp-w", scheduler=halved)
    first, _ = pipe.optimizers
    assert type(first) is Together and pipe.schedulers[0].optimizer is first
    losses(pipe, batches(2))
    assert [g["lr"] for g in first.parts[1].param_groups] == [0.01 / 4]


@pytest.mark.parametrize("kind", ["vanilla", "pipedream", "lwp-w"])
def test_a_step_that_raises(kind):
    def fails(opt, *_):
        steps.append(opt)
        if len(steps) == 4:
            opt.param_groups[0]["params"][0].data.mul_(2)
            raise ArithmeticError("planned")

    stages, data, steps = tanh_stages(3), batches(9), []
    pipe = st.Pipeline(copy.deepcopy(stages), FOREIGN["Lion"], mse, kind)
    pipe.optimizers[1].register_step_pre_hook(fails)
    with pytest.raises(st.StageError, match=r"(?s)planned; the step of Lion was cut short") as e:
        losses(pipe, data)
    assert (e.value.stage, e.value.action) == (1, "update")
    assert type(e.value.__cause__) is ArithmeticError
    in_own_storage(pipe)
    weights = copy.deepcopy(pipe.state_dict())
    state = [copy.deepcopy(o.state_dict()) for o in pipe.optimizers]
    again = losses(pipe, data[:3])
    other = st.Pipeline(stages, FOREIGN["Lion"], mse, kind)
    other.load_state_dict(weights)
    for mine, theirs in zip(other.optimizers, state, strict=True):
        mine.load_state_dict(theirs)
    assert losses(other, data[:3]) == again


def in_own_storage(pipe):
    """Check that each stage's parameters are in one buffer of the pipeline's."""
    for stage in pipe.children():
        assert len({p.untyped_storage().data_ptr() for p in stage.parameters()}) == 1


def test_data_of_another_shape_is_refused():
    class Flattening(Replacing):
        def step(self):
            for group in self.param_groups:
                group["params"][0].data = group["params"][0].data.flatten() * 2

    pipe = st.Pipeline(tanh_stages(2), lambda p: Flattening(p, lr=1.0), mse, "lwp-w")
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(st.StageError, match=r"Flattening: its step gave parameter 0 .*\(5, 5\)"):
        losses(pipe, batches(3))
    in_own_storage(pipe)
    assert all(map(torch.equal, pipe.state_dict().values(), before.values()))


def test_refusals():
    with pytest.raises(ValueError, match=r"spectrain_ext\.spectrain\(law='difference'\)"):
        st.Pipeline(tanh_stages(2), FOREIGN["Lion"], mse, "spectrain")
    with pytest.raises(ValueError, match=r"stages\[0\] has torch\.optim.*AdamW, .*optim\.AdamW"):
        st.Pipeline(tanh_stages(2), FOREIGN["AdamW"], mse, "spectrain")
    with pytest.raises(ValueError, match=r"stages\[0\] it made a LBFGS, whose step\(\) needs clos"):
        st.Pipeline(tanh_stages(2), torch.optim.LBFGS, mse, "vanilla")


@pytest.mark.parametrize("kind", ["sync", "vanilla", "lwp-w"])
def test_a_wrapper_that_has_nothing_of_torchs(kind):
    def of_torchs(p):
        first = torch.optim.SGD(p[:1], lr=0.05, momentum=0.9)
        return Together(first, torch.optim.RMSprop(p[1:], lr=0.01))

    stages, data, found = tanh_stages(3), batches(7), []
    for optimizer in (Bare, of_torchs):
        pipe = st.Pipeline(copy.deepcopy(stages), optimizer, mse, kind)
        found.append(losses(pipe, data[:5]))
        pipe.release()
        found[-1] += losses(pipe, data[5:])
    assert found[0] == found[1]


def test_modes_that_change_the_weights(tmp_path):
    """Between runs all see the weights of evaluation; runs and evaluations change only modes."""
    stages, data = tanh_stages(2), batches(6)
    whole = nn.Sequential(*copy.deepcopy(stages))
    optimizer = FOREIGN["ScheduleFree"](list(whole.parameters()))
    pipe = st.Pipeline(stages, FOREIGN["ScheduleFree"], mse, "sync", microbatches=1)
    other = st.Pipeline(copy.deepcopy(stages), FOREIGN["ScheduleFree"], mse, "sync", microbatches=1)
    for part in (data[:3], data[3:]):
        optimizer.train()
        for (x, y), _ in zip(part, pipe.run(part), strict=True):
            optimizer.zero_grad()
            mse(whole(x), y).backward()
            optimizer.step()
            close([*pipe.state_dict().values()], [*whole.state_dict().values()])
            with pytest.raises(RuntimeError, match="eval: a run of the pipeline has not ended"):
                pipe.optimizers[0].eval()
        trained = [value.clone() for value in whole.state_dict().values()]
        optimizer.eval()
        expected = [*whole.state_dict().values()]
        assert not torch.allclose(trained[0], expected[0], rtol=1e-3)
        close([*pipe.state_dict().values()], expected)
        losses(other, part)
        assert other.evaluate(data)["loss"] == pytest.approx(
            sum(mse(whole(x), y).item() for x, y in data) / 6
        )
        save(tmp_path / "weights", other, only_model=True, overwrite=True)
        close(load_file(tmp_path / "weights" / "model.safetensors"), dict(pipe.state_dict()))
    assert all(map(torch.equal, pipe.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize(
    ("method", "versions"),
    [("1f1b", 1), ("vanilla", 1), (DIFFERENCE, 3)],  # the last: working, master, before
)
def test_the_memory_that_was_predicted(method, versions):
    """The difference law has one version more than the package's prediction needs."""
    pipe = st.Pipeline(tanh_stages(4), FOREIGN["Lion"], mse, method, microbatches=1)
    losses(pipe, batches(12, size=8))
    assert pipe.measured_memory() == pipe.predicted_memory()
    assert [memory.versions for memory in pipe.measured_memory()] == [versions] * 4


@pytest.mark.parametrize("name", ["Queued", "relative steps"])
def test_groups_without_a_learning_rate(tmp_path, name):
    """Only a method that divides rates needs them."""
    stages, data = tanh_stages(3), [(x.float(), y.float()) for x, y in batches(4)]
    for method in ("auto", "vanilla", DIFFERENCE):
        modules = [copy.deepcopy(stage).float() for stage in stages]
        pipe = st.Pipeline(modules, PECULIAR[name], mse, method)
        with st.Metrics(pipe, tmp_path / "metrics.jsonl", every=2) as metrics:
            assert len([*pipe.run(data, trace=metrics)]) == 4
    for method, more in (("auto", {"microbatches": 1}), ("pipemare", {})):
        with pytest.raises(ValueError, match=r"parameter group 0 of the .* has no 'lr'"):
            st.Pipeline(stages, PECULIAR[name], mse, method, **more)


OPTIMIZERS = {
    "SGD": (sgd(), torch_sgd()),
    "AdamW": (lambda p: st.optim.AdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    **{f"foreign {name}": (make, make) for name, make in FOREIGN.items()},
}
# One of each kind: flush, none, two predictions, two stashed versions, written by the step.
OURS = ("gpipe", "vanilla", "spectrain", "pipedream-2bw", "second-order", "msnag-stash", "xpipe")
BY_DIFFERENCE = ("lwp-w", "spectrain difference")
SOME = (*OURS, *BY_DIFFERENCE, "error-feedback")
CASES = [(method, name) for method in SOME for name in ("SGD", "AdamW")]
CASES += [(method, name) for method in ("vanilla", *BY_DIFFERENCE) for name in [*OPTIMIZERS][2:]]


def narrow(n):
    return [stage.bfloat16() for stage in tanh_stages(n)]


def narrow_batches(count, size=3):
    return [(x.bfloat16(), y.bfloat16()) for x, y in batches(count, size)]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_masters_do_not_drift(method, name):
    """In bfloat16 everything rounds; the losses and weights stay near the definition's."""
    stages, data = narrow(3), narrow_batches(8, 4)
    stages[2][0].weight = stages[0][0].weight
    ours, theirs = OPTIMIZERS[name]
    more = {"microbatches": 3, "master_dtype": torch.float32}
    oracle = Oracle(stages, theirs, mse, definition_of(method, "foreign" not in name), **more)
    seen = set()

    def optimizer(params):
        made = ours(params)
        made.register_step_pre_hook(lambda *_: seen.update((p.dtype, p.grad.dtype) for p in params))
        return made

    pipe = st.Pipeline(stages, optimizer, mse, method_of(method), **more)
    expected, found = oracle.run(data), losses(pipe, data)
    assert seen == {(torch.float32, torch.float32)}
    near = {"rtol": 0.03, "atol": 0.02}
    found, expected = (torch.stack(each).float() for each in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)
    for theirs, mine in zip(oracle.stages, pipe.children(), strict=True):
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), **near)
    masters, state = pipe.masters(), pipe.state_dict()
    assert all(torch.equal(master.to(torch.bfloat16), p) for p, master in masters.items())
    assert torch.equal(state["0.0.weight"], state["2.0.weight"])
    assert pipe.get_submodule("2.0").weight not in masters


@pytest.mark.parametrize("kind", [st.optim.SGD, torch.optim.SGD])
def test_a_master_keeps_what_bfloat16_weights_would_lose(kind):
    """Updates of 1/512 of a weight of 1, which bfloat16 alone rounds away."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for master, expected in ((None, 1.0), (torch.float32, 1 - 64 / 512)):
        stage = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(stage.weight)
        pipe = st.Pipeline(
            *([stage], lambda p: kind(p, lr=1 / 512), lambda value, target: value.sum(), "sync"),
            master_dtype=master,
        )
        losses(pipe, [(one, one)] * 64)
        assert stage.weight == expected


def test_a_parameter_without_elements():
    """It has no address, beside a master and as the first, which tells a step of the weights."""
    stages, more = narrow(2), {"microbatches": 1, "master_dtype": torch.float32}
    stages[1].register_parameter("nothing", nn.Parameter(torch.zeros(0, 3, dtype=torch.bfloat16)))
    pipe = st.Pipeline(stages, FOREIGN["AdamW"], mse, "vanilla", **more)
    for _ in range(2):
        losses(pipe, narrow_batches(4))
    assert stages[1].nothing.dtype == torch.bfloat16
    alone, data, found = tanh_stages(2), batches(8), []
    beside = copy.deepcopy(alone)
    beside[0].register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
    for stages in (alone, beside):
        pipe = st.Pipeline(stages, FOREIGN["AdamW"], mse, "wpipe", microbatches=2)
        found.append(losses(pipe, data))
    assert found[0] == found[1]


def test_after_release_16_bit_parameters_and_their_state_fit_together():
    stages, data = narrow(2), narrow_batches(3)
    pipe = st.Pipeline(stages, FOREIGN["AdamW"], mse, "vanilla", master_dtype=torch.float32)
    first = pipe.optimizers[0]
    for _ in range(2):
        losses(pipe, data)
        assert next(iter(first.state.values()))["exp_avg"].dtype == torch.float32
        pipe.release()
        state = next(iter(first.state.values()))
        assert state["exp_avg"].dtype == torch.bfloat16
        assert state["step"].dtype == torch.get_default_dtype()  # as torch made it
        mse(pipe(data[0][0]), data[0][1]).backward()
        first.step()


class WideState(ByParameter):
    """Has float32 sums for 16-bit parameters, without masters."""

    def update(self, p, state, group):
        total = state.setdefault("sum", torch.zeros_like(p, dtype=torch.float32))
        total.mul_(0.9).add_(p.grad)
        p.sub_(group["lr"] * total)


def test_wide_state_outlives_a_change_of_the_method_and_a_release():
    last = []

    def note(opt, *_):
        last[:] = [state["sum"].clone() for state in opt.state.values()]

    def compare(opt, *_):
        found = [state["sum"] for state in opt.state.values()]
        torch.testing.assert_close(found, last, rtol=0, atol=0)
        compared.append(opt)

    stages, compared = narrow(2), []
    pipe = st.Pipeline(stages, lambda p: WideState(p, {"lr": 0.01}), mse, "lwp-w+sync@3")
    pipe.optimizers[0].register_step_pre_hook(compare)
    pipe.optimizers[0].register_step_post_hook(note)
    for _ in range(2):
        losses(pipe, narrow_batches(5))
        pipe.release()
    assert pipe.phase == 1 and len(compared) == 10
    assert last[0].dtype == torch.float32 and last[0].bfloat16().float().ne(last[0]).any()


@pytest.mark.parametrize("kind", [st.optim.Adam, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("first", ["sync", "lwp-w"])
def test_a_change_of_the_method_keeps_their_digits(kind, first):
    """A method of two phases is two pipelines; with a flush, two runs are one to the bit."""
    stages, runs = narrow(3), [narrow_batches(9), narrow_batches(5)]

    def make(method):
        own = copy.deepcopy(stages)
        more = {"microbatches": 1, "master_dtype": torch.float32}
        return st.Pipeline(own, lambda p: kind(p, lr=0.01), mse, method, **more)

    pipe, before, after = make(f"{first}+sync@9"), make(first), make("sync")
    found = [losses(pipe, run) for run in runs]
    assert losses(before, runs[0]) == found[0]
    assert first != "sync" or losses(make(first), runs[0] + runs[1]) == found[0] + found[1]
    after.load_state_dict(before.state_dict())
    there = after.masters()
    for p, q in zip(before.parameters(), after.parameters(), strict=True):
        there[q].copy_(before.masters()[p])
    for a, b in zip(before.optimizers, after.optimizers, strict=True):
        b.load_state_dict(a.state_dict())
    assert losses(after, runs[1]) == found[1]
    for a, b in zip(pipe.optimizers, after.optimizers, strict=True):
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)
    close(pipe.state_dict(), after.state_dict())
