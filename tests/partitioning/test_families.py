"""Tests families of causal language models: equal results in stages, or a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

tf = pytest.importorskip("transformers")

#: Expected result and config by family. A dozen families are left out because a small model is not
#: as easy to make.
FAMILIES = json.loads(Path(__file__).with_name("families.json").read_text())
OFTEN = ("deepseek_v4", "llama4", "mamba", "minicpm3", "nanochat", "openai-gpt", "roformer")
OFTEN += ("xlnet", "xmod")


@pytest.mark.parametrize(
    "family", [f if f in OFTEN else pytest.param(f, marks=pytest.mark.nightly) for f in FAMILIES]
)
def test_both_modes_are_the_models(family):
    from helpers import families

    if family not in tf.CONFIG_MAPPING:
        pytest.skip("this version of transformers has no such family")
    expected, *config = FAMILIES[family]
    found = families.outcome(family, *config or [{}])
    kind, _, why = expected.partition(": ")
    assert found == expected if kind != "refused" else why in found


ROUTED = ("ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe", "jamba", "laguna", "minimax")
ROUTED += ("mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next")


@pytest.mark.nightly
@pytest.mark.parametrize("family", ROUTED)
def test_the_loss_that_balances_experts_is_the_models(family: str) -> None:
    from helpers import families

    _, *config = FAMILIES[family]
    asking = {**(config or [{}])[0], "output_router_logits": True}
    assert families.outcome(family, asking) in ("equal", "close")
