"""Tests the language models: causal, at chance before training, blocks by their definition."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from studies.models.text import LSTMBlock, Subspace, TransformerBlock, gpt, residual_lstm, speedrun

Build = Callable[..., list[nn.Module]]

TOKENS = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
GPT = pytest.param(gpt, {"context": 7}, id="gpt")
LSTM = pytest.param(residual_lstm, {}, id="lstm")
RACED = pytest.param(speedrun, {}, id="speedrun")
SUBSPACE = pytest.param(speedrun, {"rank": 6}, id="subspace")


def make(build: Build, arguments: dict[str, int], stages: int, width: int = 8) -> list[nn.Module]:
    return build(stages, vocabulary=11, width=width, depth=3, seed=3, **arguments)


@pytest.mark.parametrize(("build", "arguments"), [GPT, LSTM, RACED, SUBSPACE])
def test_no_position_sees_a_later_one(build: Build, arguments: dict[str, int]) -> None:
    """And every later position sees an earlier one, through attention and state."""
    model = nn.Sequential(*make(build, arguments, 2, 32))
    if build is speedrun:  # whose outputs begin at 0
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
    changed = TOKENS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert ((after[:, 4:] - before[:, 4:]).abs().amax(dim=(0, 2)) > 1e-6).all()


@pytest.mark.parametrize(("build", "arguments"), [GPT, LSTM, RACED, SUBSPACE])
def test_an_untrained_model_guesses(build: Build, arguments: dict[str, int]) -> None:
    """Its loss is that of the uniform distribution."""
    logits = nn.Sequential(*make(build, arguments, 3))(TOKENS)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())
    assert loss.item() == pytest.approx(torch.tensor(11.0).log().item(), abs=0.4)


def test_a_transformer_block_is_pre_norm_attention_and_mlp() -> None:
    block = TransformerBlock(8, heads=2)
    x = torch.randn(3, 5, 8)
    query, key, value = block.query_key_value(block.attention_norm(x)).chunk(3, dim=-1)
    mixed = torch.empty(3, 5, 8)
    for head in (slice(0, 4), slice(4, 8)):
        for row in range(5):
            scores = query[:, row : row + 1, head] @ key[:, : row + 1, head].mT / 4**0.5
            mixed[:, row, head] = (scores.softmax(-1) @ value[:, : row + 1, head]).squeeze(1)
    y = x + block.project(mixed)
    torch.testing.assert_close(block(x), y + block.mlp(block.mlp_norm(y)))


@pytest.mark.parametrize(("build", "arguments"), [GPT, RACED])
def test_heads_must_divide_the_width(build: Build, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="width must be a multiple of the 3 heads, got 97"):
        make(build, arguments, 2, 97)
    assert len(make(build, arguments, 2, 96)) == 2  # one head per 32


def test_an_lstm_block_adds_to_its_input() -> None:
    block, x = LSTMBlock(6), torch.randn(2, 4, 6)
    torch.testing.assert_close(block(x), x + block.lstm(block.norm(x))[0])


@pytest.mark.parametrize(("build", "arguments"), [GPT, LSTM])
def test_the_backward_meets_weights_that_were_written_after_the_forward(
    build: Build, arguments: dict[str, int]
) -> None:
    """Methods that change weights between the two, as kernels do, rely on this.

    A block's input gradient must be that of the new weights with the old activations: other weights
    must change the gradient, and restoring the old ones in time must restore it.
    """
    block = make(build, arguments, 5)[1]
    x = torch.randn(2, 7, 8, requires_grad=True)
    kept = [p.detach().clone() for p in block.parameters()]

    def gradient(*factors: float) -> torch.Tensor:
        output = block(x)
        for factor in factors:
            for p, value in zip(block.parameters(), kept, strict=True):
                p.data.copy_(factor * value)
        (found,) = torch.autograd.grad(output.square().sum(), x)
        for p, value in zip(block.parameters(), kept, strict=True):
            p.data.copy_(value)
        return found

    unchanged = gradient()
    assert torch.equal(gradient(2.0, 1.0), unchanged)
    assert not torch.allclose(gradient(2.0), unchanged, rtol=1e-2)


# The raced transformer


@pytest.mark.parametrize("rank", [None, 6])
def test_edges_carry_activations_or_coordinates_and_tokens(rank: int | None) -> None:
    stages = speedrun(3, vocabulary=11, width=32, depth=3, rank=rank)
    assert torch.equal(nn.Sequential(*stages)(TOKENS), torch.zeros(2, 7, 11))
    edge = stages[0](TOKENS)
    assert edge.shape == (2, 7, 32 if rank is None else rank + 1)
    if rank is not None:
        assert torch.equal(edge[..., -1].long(), TOKENS)


def test_a_subspace_loses_nothing_of_what_lies_in_it() -> None:
    subspace = Subspace(11, 32, 6)
    x = torch.randn(2, 7, 6) @ subspace.columns.T + subspace.fixed[TOKENS]
    back, tokens = subspace.decode(subspace.encode(x, TOKENS))
    torch.testing.assert_close(back, x)
    assert torch.equal(tokens, TOKENS)
