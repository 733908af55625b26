"""Tests simulated times of methods: closed forms, real stages, timelines on one axis."""

from __future__ import annotations

import pytest

from spectrain_ext.method import find_method
from studies import times
from studies.builtin import maker_of
from studies.settings import settle
from studies.times import (
    Work,
    draw_methods_together,
    measured_work,
    minibatch_time,
    relative_times,
)

pytest.importorskip("sklearn")


def settings_for(*methods, **more):
    return settle({"methods": methods, **more}, quick=True)


@pytest.mark.parametrize("stages", [1, 4, 8])
def test_bubbles_of_even_stages(stages):
    """Slots of one forward and one backward: N for one minibatch, M + N - 1 for M parts."""
    even = Work([1.0] * stages, [2.0] * stages)
    assert even.slowest == 3.0
    for name, microbatches, slots in (
        ("sync", 1, stages),
        ("1f1b", 8, (8 + stages - 1) / 8),
        ("gpipe", 4, (4 + stages - 1) / 4),
        ("vanilla", 1, 1.0),
        ("auto", 4, 1.0),
    ):
        took = minibatch_time(find_method(name), microbatches, even)
        assert took / even.slowest == pytest.approx(slots), name


def test_the_slowest_stage_decides():
    work = Work([1.0, 3.0, 1.0], [2.0, 4.0, 2.0])
    assert work.slowest == 7.0
    assert minibatch_time(find_method("vanilla"), 1, work) == pytest.approx(7.0)
    assert minibatch_time(find_method("sync"), 1, work) == pytest.approx(13.0)


def test_methods_are_compared_in_one_unit(monkeypatch, tmp_path):
    asked: list[int] = []

    def given(settings, make, stages, devices):
        asked.append(stages)
        assert len(devices) == stages
        return Work([1.0] * stages, [2.0] * stages) if stages > 1 else Work([3.0], [6.0])

    monkeypatch.setattr(times, "measured_work", given)
    settings = settings_for("xgrad", "sync", "1f1b", "auto", stages=4)
    found = relative_times(settings, maker_of(settings, tmp_path))
    # the uncut model on one device has no bubbles, and all the work
    assert found == pytest.approx({"xgrad": 3.0, "sync": 4.0, "1f1b": 7 / 4, "auto": 1.0})
    assert sorted(asked) == [1, 4]


def test_stages_are_measured(tmp_path):
    settings = settings_for("sync", stages=3, width=256)
    work = measured_work(settings, maker_of(settings, tmp_path), 3, ["cpu"] * 3)
    assert len(work.forward) == len(work.backward) == 3
    assert all(0 < seconds < 1 for seconds in (*work.forward, *work.backward))
    assert work.slowest < sum(work.forward) + sum(work.backward)


def test_methods_are_drawn_together(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "t.svg"
    methods = [(find_method("sync"), "#000000"), (find_method("auto"), "#009E73")]
    draw_methods_together(picture, methods, 4)
    text = picture.read_text()
    # two minibatches of sync; eight of auto without a bubble, less seven quarters for its ramp
    for said in ("sync", "auto, M = 4", "2 minibatches ended, idle 75 %", "7 minibatches ended"):
        assert said in text, said
    assert "#009e73" in text.lower()
