"""Tests the digits and the order of minibatches."""

import sys

import pytest
import torch

from studies.data.sources import load_digits
from studies.data.split import Batches, Split
from studies.workload import epochs_of


def _split(inputs: torch.Tensor, targets: torch.Tensor) -> Split:
    return Split("t", "features", inputs, targets, inputs, targets, classes=len(targets))


def test_digits_are_scaled_and_split_once_and_for_all() -> None:
    pytest.importorskip("sklearn")
    data = load_digits()
    assert data.train_inputs.shape == (1437, 64)
    assert data.test_inputs.shape == (360, 64)
    assert data.train_targets.shape == (1437,)
    assert data.test_targets.shape == (360,)
    assert data.features == 64
    everything = torch.cat([data.train_inputs, data.test_inputs])
    assert everything.min().item() == pytest.approx(-0.3)
    assert everything.max().item() == pytest.approx(0.7)
    assert set(data.train_targets.tolist()) == set(data.test_targets.tolist()) == set(range(10))
    again = load_digits()
    assert torch.equal(again.train_inputs, data.train_inputs)
    assert torch.equal(again.test_targets, data.test_targets)


def test_no_sample_is_in_both_parts() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    data = load_digits()
    rows = torch.cat([data.train_inputs, data.test_inputs]).add(0.3).mul(16).round()
    expected = torch.tensor(datasets.load_digits().data.tolist())
    assert sorted(rows.tolist()) == sorted(expected.tolist())


def test_a_missing_scikit_learn_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -r studies/requirements.txt"):
        load_digits()


def test_every_epoch_visits_every_sample_once() -> None:
    inputs, targets = torch.arange(23.0).unsqueeze(1), torch.arange(23)
    train = Batches(_split(inputs, targets), batch_size=5, seed=0)
    assert len(train) == 5
    batches = list(epochs_of(train, 3))
    assert len(batches) == 15
    assert [len(x) for x, _ in batches] == [5, 5, 5, 5, 3] * 3
    orders = [torch.cat([y for _, y in batches[start : start + 5]]) for start in (0, 5, 10)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(23))
    assert not torch.equal(orders[0], orders[1])
    assert all(torch.equal(x.squeeze(1), y.float()) for x, y in batches)


def test_the_order_is_a_function_of_the_seed() -> None:
    inputs, targets = torch.randn(20, 2), torch.arange(20)

    def order(seed: int) -> list[int]:
        batches = epochs_of(Batches(_split(inputs, targets), batch_size=7, seed=seed), 2)
        return torch.cat([y for _, y in batches]).tolist()

    state = torch.random.get_rng_state()
    first = order(4)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert order(4) == first
    assert order(5) != first
