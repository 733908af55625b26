"""Writes a pipeline's optional behaviours as words, which tables of settings can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import spectrain_ext as st

#: What makes the pass of a word that is not None or False.
WORDS: dict[str, Callable[[Any], st.passes.Pass]] = {
    "on_nonfinite": st.passes.CheckFinite,
    "offload": lambda _: st.passes.OffloadActivations(),
    "codec": st.passes.Compress,
    "averaging": st.passes.AverageWeights,
    "share_loss": lambda _: st.passes.ShareLoss(),
}


def with_passes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pipeline's arguments, with passes in the place of words."""
    made = [make(settings[word]) for word, make in WORDS.items() if settings.get(word)]
    return {key: value for key, value in settings.items() if key not in WORDS} | {
        "passes": [*settings.get("passes", ()), *made]
    }
