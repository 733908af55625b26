"""Tests the transformers and the LSTM: causal, a function of the seed, cut anywhere."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from studies.models.text import LSTMBlock, Subspace, TransformerBlock, gpt, residual_lstm, speedrun

Build = Callable[..., list[nn.Module]]

MODELS = [
    pytest.param(gpt, {"vocabulary": 11, "context": 7, "width": 8, "depth": 3}, id="gpt"),
    pytest.param(residual_lstm, {"vocabulary": 11, "width": 8, "depth": 3}, id="lstm"),
]
TOKENS = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("build", "arguments"), MODELS)
def test_every_cut_computes_the_same(build: Build, arguments: dict[str, int]) -> None:
    expected = nn.Sequential(*build(1, **arguments, seed=3))(TOKENS)
    assert expected.shape == (2, 7, 11)
    for stages in (2, 4, 5):
        cut = build(stages, **arguments, seed=3)
        assert len(cut) == stages
        assert torch.equal(nn.Sequential(*cut)(TOKENS), expected)
    with pytest.raises(ValueError, match="between 1 and the 5 layers, got 6"):
        build(6, **arguments)


@pytest.mark.parametrize(("build", "arguments"), MODELS)
def test_no_position_sees_a_later_one(build: Build, arguments: dict[str, int]) -> None:
    model = nn.Sequential(*build(2, **arguments))
    before = model(TOKENS)
    changed = TOKENS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    after = model(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    # every later position sees it, through attention and state
    assert ((after[:, 4:] - before[:, 4:]).abs().amax(dim=(0, 2)) > 1e-6).all()


@pytest.mark.parametrize(("build", "arguments"), MODELS)
def test_the_seed_decides_and_the_global_state_does_not(
    build: Build, arguments: dict[str, int]
) -> None:
    def weights(seed: int) -> torch.Tensor:
        model = nn.Sequential(*build(2, **arguments, seed=seed))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    state = torch.random.get_rng_state()
    first = weights(5)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(9)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)


@pytest.mark.parametrize(("build", "arguments"), MODELS)
def test_an_untrained_model_guesses(build: Build, arguments: dict[str, int]) -> None:
    """Its loss is that of the uniform distribution."""
    model = nn.Sequential(*build(3, **arguments))
    loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
    assert loss.item() == pytest.approx(torch.tensor(11.0).log().item(), abs=0.4)


def test_a_transformer_block_is_pre_norm_attention_and_mlp() -> None:
    torch.manual_seed(0)
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


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width must be a multiple of the 3 heads, got 97"):
        gpt(2, vocabulary=5, context=4, width=97)
    assert len(gpt(2, vocabulary=5, context=4, width=96)) == 2  # one head per 32


def test_an_lstm_block_adds_to_its_input() -> None:
    block = LSTMBlock(6)
    x = torch.randn(2, 4, 6)
    states, _ = block.lstm(block.norm(x))
    torch.testing.assert_close(block(x), x + states)


@pytest.mark.parametrize(("build", "arguments"), MODELS)
def test_the_backward_meets_weights_that_were_written_after_the_forward(
    build: Build, arguments: dict[str, int]
) -> None:
    """Methods that change weights between the two, as kernels do, rely on this.

    A block's input gradient must be that of the new weights with the old activations: other weights
    must change the gradient, and restoring the old ones in time must restore it.
    """
    block = build(5, **arguments)[1]
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    kept = [p.detach().clone() for p in block.parameters()]

    def gradient(between: Callable[[], None]) -> torch.Tensor:
        output = block(x)
        between()
        (found,) = torch.autograd.grad(output.square().sum(), x)
        for p, value in zip(block.parameters(), kept, strict=True):
            p.data.copy_(value)
        return found

    def write_others() -> None:
        for p in block.parameters():
            p.data.mul_(2)

    def write_twice() -> None:
        write_others()
        for p, value in zip(block.parameters(), kept, strict=True):
            p.data.copy_(value)

    unchanged = gradient(lambda: None)
    assert torch.equal(gradient(write_twice), unchanged)
    assert not torch.allclose(gradient(write_others), unchanged, rtol=1e-2)


@pytest.mark.parametrize("rank", [None, 6])
def test_the_raced_transformer(rank: int | None) -> None:
    """One block per stage; it guesses at first; causal; edges carry coordinates and tokens."""
    stages = speedrun(3, vocabulary=11, width=32, depth=3, rank=rank, seed=3)
    model = nn.Sequential(*stages)
    assert torch.equal(model(TOKENS), torch.zeros(2, 7, 11))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for p in model.parameters():
            p.normal_(std=0.3)
    before, changed = model(TOKENS), TOKENS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    after = model(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert ((after[:, 4:] - before[:, 4:]).abs().amax(dim=(0, 2)) > 1e-6).all()
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


def test_what_the_raced_transformer_cannot_be() -> None:
    with pytest.raises(ValueError, match="width must be a multiple of the 3 heads, got 97"):
        speedrun(2, vocabulary=5, width=97)
    with pytest.raises(ValueError, match="between 1 and the 8 layers, got 9"):
        speedrun(9, vocabulary=5)
