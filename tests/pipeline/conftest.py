"""The precision of the oracle, for files that ask for it."""

from __future__ import annotations

import pytest
from helpers.pipeline_cases import in_float64

float64 = pytest.fixture(in_float64, name="float64")
