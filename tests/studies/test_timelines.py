"""Tests timelines of several methods on one time axis, by their text."""

from __future__ import annotations

import pytest

from spectrain_ext.method import find_method
from studies.times import draw_methods_together

pytest.importorskip("matplotlib")


def test_methods_are_drawn_together(tmp_path):
    picture = tmp_path / "t.svg"
    methods = [(find_method("sync"), "#000000"), (find_method("auto"), "#009E73")]
    draw_methods_together(picture, methods, 4)
    text = picture.read_text()
    # two minibatches of sync; eight of auto without a bubble, less seven quarters for its ramp
    for said in ("sync", "auto, M = 4", "2 minibatches ended, idle 75 %", "7 minibatches ended"):
        assert said in text, said
    assert "#009e73" in text.lower()
