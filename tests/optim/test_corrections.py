"""Tests bound optimizers with corrections by stale weights: steps, state, errors."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers.optim_cases import adam_step, assert_bits, give_gradients, make_params
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.operators.corrections import AdaptiveBraking, DelayCompensation, GapAware
from spectrain_ext.optim.foreign import Foreign
from spectrain_ext.schedule import Rules
from spectrain_ext.weights.storage import Content, Storage

F64 = torch.float64
CORRECTIONS = [DelayCompensation(0.3), GapAware(0.9)]
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02},
    "Adam": {"lr": 0.02, "weight_decay": 0.05},
    "AdamW": {"lr": 0.02, "weight_decay": 0.05},
    "NAdam": {"lr": 0.02, "weight_decay": 0.05},
}
every_optimizer = pytest.mark.parametrize("name", OPTIONS)
every_correction = pytest.mark.parametrize("correction", CORRECTIONS, ids=str)


class Stage:
    """An optimizer in a stage's storage: a master, and a working buffer with other weights."""

    def __init__(self, name: str, correction: Any, dtype: torch.dtype = F64, **more: Any) -> None:
        torch.manual_seed(0)
        self.params = make_params(dtype)
        self.optimizer = getattr(st.optim, name)(self.params, **{**OPTIONS[name], **more})
        self.storage = self.stored(correction)

    def stored(self, correction: Any, master_dtype: torch.dtype | None = torch.float32) -> Storage:
        rules, dtype = Rules(correction=correction), master_dtype
        storage = Storage(self.params, self.optimizer, rules, master=True, master_dtype=dtype)
        storage.bind()
        storage.begin()
        self.optimizer.read_stale(storage.home.flat.views)
        return storage

    def rebind(self, correction: Any) -> None:
        self.storage.end()
        self.storage.unbind()
        self.storage = self.stored(correction)

    @property
    def outs(self) -> dict[Tensor, Tensor]:
        return self.storage.home.flat.views

    @property
    def weights(self) -> list[Tensor]:
        true = self.storage.true_weights()
        return [true[p].clone() for p in self.params]

    def stale(self) -> list[Tensor]:
        """Fill the working buffer with weights other than the true ones."""
        self.storage.write(Content(0), self.storage.home)
        for view in self.storage.home.flat.views.values():
            view.add_(torch.randn_like(view), alpha=0.05)
        return [p.detach().clone() for p in self.params]

    def step(self, none: tuple[int, ...] = ()) -> list[Tensor | None]:
        give_gradients(self.params, none=none)
        grads = [None if p.grad is None else p.grad.clone() for p in self.params]
        self.optimizer.step()
        return grads


class Definition:
    """The same in float64, from the papers' formulas."""

    def __init__(self, name: str, correction: Any, stage: Stage) -> None:
        self.name, self.correction, self.group = name, correction, stage.optimizer.param_groups[0]
        self.w = stage.weights
        self.v, self.u, self.average = ([torch.zeros_like(w) for w in self.w] for _ in range(3))
        self.steps = [0] * len(self.w)
        self.largest = 0.0

    def step(self, grads: list[Tensor | None], stale: list[Tensor]) -> None:
        self.largest = max(self.largest, self.group["lr"])
        for i, g in enumerate(grads):
            if g is not None:
                self._step(i, g, stale[i])

    def _step(self, i: int, g: Tensor, stale: Tensor) -> None:
        w, n, gap = self.w[i], self.steps[i], self.w[i] - stale
        g = -g if self.group.get("maximize") else g
        sgd, decay = self.name == "SGD", self.group["weight_decay"]
        penalty = torch.ones_like(w)
        if isinstance(self.correction, DelayCompensation):
            g = g + self.correction.strength * g * g * gap
        elif n:
            usual = (self.average[i] / (1 - self.correction.decay**n)).sqrt()
            usual = self.largest * (usual + 1e-8) if sgd else usual + self.group["eps"]
            penalty = 1 + gap.abs() / usual
        if sgd:
            d = (g + decay * w) / penalty
            self.v[i] = d if n == 0 else self.group["momentum"] * self.v[i] + d
            taken = self.v[i]
            self.w[i] = w - self.group["lr"] * taken
        else:
            decoupled = self.group["decoupled_weight_decay"]
            d = g / penalty if decoupled else (g + decay * w) / penalty
            group = {**self.group, "weight_decay": decay if decoupled else 0.0}
            new, self.v[i], self.u[i] = adam_step(
                self.name, group, n + 1, w, d, self.v[i], self.u[i]
            )
            taken = (w * (1 - self.group["lr"] * decay) if decoupled else w) - new
            self.w[i] = new
        if isinstance(self.correction, GapAware):
            keep = self.correction.decay
            self.average[i] = keep * self.average[i] + (1 - keep) * taken * taken
        self.steps[i] += 1


def _close(name: str, actual: list[Tensor], expected: list[Tensor]) -> None:
    rtol = 1e-6 if name == "NAdam" else 1e-10  # torch keeps its product of mu in float32
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol / 100)


@every_optimizer
@every_correction
class TestSteps:
    def test_are_the_definition(self, name: str, correction: Any) -> None:
        """With predictions in the step and alone, other rates, and missing gradients."""
        stage = Stage(name, correction)
        definition = Definition(name, correction, stage)
        for t in range(7):
            stage.optimizer.param_groups[0]["lr"] *= (1.0, 2.0, 0.25)[t % 3]
            stale = stage.stale()
            if t % 2:
                stage.optimizer.write_with_next_step(stage.outs, 2.0)
            definition.step(stage.step(none=(1, 5) if t in (0, 3) else ()), stale)
            _close(name, stage.weights, definition.w)
            if t % 2:  # written in a separate pass
                written = [p.detach().clone() for p in stage.params]
                stage.optimizer.write_prediction(stage.outs, 2.0)
                assert_bits(stage.params, written)
        if correction.buffers:
            state = [stage.optimizer.state[p] for p in stage.params]
            _close(name, [entry["gap_average"] for entry in state], definition.average)
            assert [int(entry["gap_step"]) for entry in state] == definition.steps
            assert stage.optimizer.param_groups[0]["gap_rate"] == definition.largest

    def test_go_on_from_saved_state(self, name: str, correction: Any) -> None:
        """In another optimizer and in the same one bound again, bit for bit."""
        torch.manual_seed(1)
        stage = Stage(name, correction)
        for _ in range(3):
            stage.stale()
            stage.step()
        stage.storage.end()
        weights = [p.detach().clone() for p in stage.params]
        saved = copy.deepcopy(stage.optimizer.state_dict())
        stage.storage.begin()

        other = Stage(name, correction)
        other.optimizer.load_state_dict(saved)
        other.storage.end()
        for p, w in zip(other.params, weights, strict=True):
            p.data.copy_(w)
        other.storage.begin()

        for again in (False, True):
            if again:
                stage.rebind(correction)
            for each in (stage, other):
                torch.manual_seed(2)
                for _ in range(2):
                    each.stale()
                    each.step()
            assert_bits(stage.weights, other.weights)
        keys = set(stage.optimizer.state_dict()["state"][0])
        assert ("gap_average" in keys) is bool(correction.buffers)
        assert ("gap_step" in keys) is bool(correction.buffers)

    def test_begin_and_end(self, name: str, correction: Any) -> None:
        """Begun and ended during training: the rule's state continues, also when begun again."""
        stage = Stage(name, None)
        twin = Stage(name, None)
        for each in (stage, twin):
            torch.manual_seed(3)
            each.step()
        stage.rebind(correction)
        twin.rebind(None)
        torch.manual_seed(4)
        stage.step()  # W_stale is W
        torch.manual_seed(4)
        twin.step()
        assert_bits(stage.weights, twin.weights)
        for each in (stage, twin):
            each.rebind(None)
            torch.manual_seed(5)
            each.stale()
            each.step()
        assert_bits(stage.weights, twin.weights)
        if correction.buffers:
            entry = stage.optimizer.state[stage.params[0]]
            assert int(entry["gap_step"]) == 1
            average = entry["gap_average"].clone()
            stage.rebind(correction)
            assert torch.equal(stage.optimizer.state[stage.params[0]]["gap_average"], average)
            copied = copy.deepcopy(stage.optimizer).state_dict()["state"]
            assert copied[0].keys() == stage.optimizer.state_dict()["state"][0].keys()

    def test_no_gap_is_the_plain_step(self, name: str, correction: Any) -> None:
        stage, plain = Stage(name, correction), Stage(name, None)
        for each in (stage, plain):
            torch.manual_seed(6)
            for _ in range(3):
                each.storage.write(Content(0), each.storage.home)
                each.step()
        assert_bits(stage.weights, plain.weights)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_weights_with_a_master(
        self, name: str, correction: Any, dtype: torch.dtype
    ) -> None:
        stage = Stage(name, correction, dtype)
        before = stage.weights
        stage.stale()
        stage.step()
        stage.stale()
        stage.step()
        assert stage.weights[0].dtype == torch.float32
        assert not torch.equal(stage.weights[0], before[0])
        if correction.buffers:
            assert stage.optimizer.state[stage.params[0]]["gap_average"].dtype == torch.float32

    def test_up_and_down_are_the_same(self, name: str, correction: Any) -> None:
        """Minimizing f is maximizing -f."""
        down, up = Stage(name, correction), Stage(name, correction, maximize=True)
        for each, sign in ((down, 1.0), (up, -1.0)):
            torch.manual_seed(7)
            for _ in range(3):
                each.stale()
                give_gradients(each.params)
                for p in each.params:
                    p.grad = sign * p.grad
                each.optimizer.step()
        assert_bits(down.weights, up.weights)

    def test_gradients_are_unscaled_first(self, name: str, correction: Any) -> None:
        scaled, plain = Stage(name, correction), Stage(name, correction)
        for each, scale in ((scaled, 8.0), (plain, 1.0)):
            torch.manual_seed(8)
            each.optimizer.grad_scale, each.optimizer.found_inf = torch.tensor(scale), None
            for _ in range(3):
                each.stale()
                give_gradients(each.params)
                for p in each.params:
                    p.grad = p.grad * scale
                each.optimizer.step()
        assert_bits(scaled.weights, plain.weights)


def test_second_order_predictions_have_the_corrected_gradient() -> None:
    stage, plain = Stage("SGD", DelayCompensation(0.3)), Stage("SGD", None)
    for _ in range(2):
        weights, stale = stage.weights, stage.stale()
        give_gradients(stage.params, plain.params)
        for p, w, s in zip(plain.params, weights, stale, strict=True):
            assert p.grad is not None
            p.grad += 0.3 * p.grad**2 * (w - s)
        for each in (stage, plain):
            each.optimizer.write_with_next_step(each.outs, st.laws.SecondOrder(2))
            each.optimizer.step()
    for a, b in zip(stage.params, plain.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


class TestOwnAverage:
    def test_is_the_storages(self) -> None:
        """The buffers hold it; a parameter without state starts from 0."""
        stage = Stage("SGD", GapAware())
        stage.stale()
        stage.step()
        entry = stage.optimizer.state[stage.params[0]]
        inside = {buffer.untyped_storage().data_ptr() for buffer in stage.storage.buffers()}
        assert entry["gap_average"].untyped_storage().data_ptr() in inside
        saved = stage.optimizer.state_dict()["state"][0]["gap_average"]
        assert saved.untyped_storage().data_ptr() not in inside

    def test_a_skipped_step_is_not_counted(self) -> None:
        stage = Stage("SGD", GapAware())
        stage.stale()
        stage.step()
        before = stage.optimizer.state_dict()
        stage.stale()
        stage.optimizer.found_inf = torch.tensor(1.0)
        stage.optimizer.grad_scale = None
        stage.step()
        after = stage.optimizer.state_dict()
        for key, entry in before["state"].items():
            assert int(after["state"][key]["gap_step"]) == int(entry["gap_step"]) == 1
            assert torch.equal(after["state"][key]["gap_average"], entry["gap_average"])

    def test_a_rate_that_the_largest_was_not_seen_of(self) -> None:
        """A loaded group may lack it."""
        stage = Stage("SGD", GapAware())
        stage.step()
        saved = stage.optimizer.state_dict()
        del saved["param_groups"][0]["gap_rate"]
        stage.optimizer.load_state_dict(saved)
        stage.step()
        assert stage.optimizer.param_groups[0]["gap_rate"] == 0.1


class TestValues:
    def test_are_values(self) -> None:
        assert GapAware() == GapAware(0.999)
        assert len({DelayCompensation(1), DelayCompensation(1.0)}) == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            GapAware().decay = 0.5  # type: ignore[misc]
        assert st.corrections.GapAware is GapAware

    @pytest.mark.parametrize("strength", [-1.0, math.nan, math.inf, "1", None])
    def test_bad_strength(self, strength: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="strength"):
            DelayCompensation(strength)

    @pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan, "1"])
    def test_bad_decay(self, decay: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="decay"):
            GapAware(decay)


class TestRefusals:
    def test_unbound(self) -> None:
        stage = Stage("SGD", DelayCompensation(1))
        stage.storage.end()
        stage.storage.unbind()
        with pytest.raises(RuntimeError, match="not bound"):
            stage.optimizer.read_stale(stage.outs)

    def test_bad_arguments(self) -> None:
        p = nn.Parameter(torch.ones(3))
        optimizer = st.optim.SGD([p], lr=0.1, momentum=0.9)
        views: dict[str, Any] = {"momentum_buffer": {p: torch.zeros(3)}}
        with pytest.raises(TypeError, match="correction: expected"):
            optimizer.bind(None, views, 0.3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="gap_average"):
            optimizer.bind(None, views, GapAware())
        p.grad = torch.ones(3)
        optimizer.step()  # nothing has changed
        assert optimizer.state[p].keys() == {"momentum_buffer"}

    def test_no_momentum(self) -> None:
        with pytest.raises(ValueError, match="momentum 0: GapAware"):
            Stage("SGD", GapAware(), momentum=0.0)
        stage = Stage("SGD", GapAware())
        stage.optimizer.param_groups[0]["momentum"] = 0.0
        with pytest.raises(ValueError, match="momentum 0: GapAware"):
            stage.step()

    def test_delay_compensation_needs_none(self) -> None:
        stage = Stage("SGD", DelayCompensation(0.3), momentum=0.0, weight_decay=0.0)
        w, stale = stage.weights, stage.stale()
        for old, s, g, new in zip(w, stale, stage.step(), stage.weights, strict=True):
            assert g is not None
            torch.testing.assert_close(new, old - 0.1 * (g + 0.3 * g * g * (old - s)))

    def test_16_bit_weights(self) -> None:
        stage = Stage("SGD", None, torch.bfloat16)
        stage.storage.end()
        stage.storage.unbind()
        with pytest.raises(TypeError, match="float32 or float64"):
            stage.stored(DelayCompensation(1), master_dtype=None)

    def test_foreign(self) -> None:
        foreign = Foreign(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
        foreign.bind(None, {})
        with pytest.raises(TypeError, match=r"SGD cannot be corrected by GapAware"):
            foreign.bind(None, {}, GapAware())


def test_braking_has_gradients_of_another_layout_as_well() -> None:
    found = []
    for transposed in (False, True):
        p = nn.Parameter(torch.ones(3, 2))
        optimizer = st.optim.SGD([p], lr=0.1, momentum=0.9)
        views = {"momentum_buffer": {p: torch.zeros(3, 2)}}
        optimizer.bind(None, views, AdaptiveBraking(0.5))
        for step in range(3):
            grad = torch.arange(6.0).reshape(3, 2) - step
            p.grad = grad.T.contiguous().T if transposed else grad
            optimizer.step()
        found.append(p.detach().clone())
    assert torch.equal(*found)
