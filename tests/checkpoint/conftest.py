"""A checkpoint to damage, and a pipeline that must not change."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.checkpoint_cases import batches, pipeline, train

import spectrain_ext as st
from spectrain_ext.checkpoint import save


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pipe = pipeline(2)
    train(pipe, batches(3))
    save(tmp_path / "c", pipe, minibatches=3)
    return tmp_path / "c"


@pytest.fixture
def trained() -> st.Pipeline:
    pipe = pipeline(2, seed=3)
    train(pipe, batches(3))
    return pipe
