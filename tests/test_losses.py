import pytest
import torch
from torch import nn

from tokenseek_trainer import losses
from tokenseek_trainer.losses import TokenStatistics, losses_and_gradient, token_losses, weighted_loss


VOCAB, WIDTH = 11, 6


class SoftcapHead(nn.Module):
    """A random head with a nonlinearity, as gemma's. It records how many positions it is asked for at once."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCAB, dtype=dtype)
        nn.init.normal_(self.linear.weight, std=2)
        self.sizes = []

    def forward(self, hidden):
        assert hidden.ndim == 3
        assert hidden.shape[0] == 1
        self.sizes.append(hidden.shape[1])
        return 5 * torch.tanh(self.linear(hidden) / 5)


def problem(count, dtype=torch.float64):
    hidden = torch.randn(count, WIDTH, dtype=dtype)
    weights = torch.rand(count, dtype=torch.float64) * 9
    weights[::4] = 0
    return SoftcapHead(dtype), hidden, torch.randint(0, VOCAB, (count,)), weights


def by_hand(head, hidden, targets, smoothing):
    """Cross-entropy of each position from the full logits: (1 - s) * -log p[target] + s * mean over the vocabulary."""
    logits = 5 * torch.tanh((hidden @ head.linear.weight.T + head.linear.bias) / 5)
    surprise = torch.logsumexp(logits, -1, keepdim=True) - logits
    own = torch.stack([surprise[i, target] for i, target in enumerate(targets.tolist())])
    return (1 - smoothing) * own + smoothing * surprise.sum(-1) / VOCAB


def oracle(head, hidden, targets, weights, smoothing):
    """The weighted sum, and its gradients at the hidden states and the head's parameters, by plain autograd."""
    hidden = hidden.clone().requires_grad_()
    loss = (by_hand(head, hidden, targets, smoothing) * weights).sum()
    return loss.detach(), torch.autograd.grad(loss, [hidden, head.linear.weight, head.linear.bias])


def assert_close(found, expected):
    """Relative to the norm of the whole, as gradients are compared everywhere."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert (found - expected).norm() <= 1e-12 * expected.norm()


# Positions per chunk: one, a number that leaves a remainder, all of them, and no limit that matters.
each_chunk = pytest.mark.parametrize("chunk", [1, 4, 23, None])
each_smoothing = pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])


def limit(monkeypatch, chunk):
    if chunk is not None:
        monkeypatch.setattr(losses, "CHUNK_POSITIONS", 1)
        monkeypatch.setattr(losses, "CHUNK_LOGITS", chunk * VOCAB + VOCAB - 1)


@each_smoothing
def test_token_losses_equal_the_formula(smoothing):
    head, hidden, targets, _ = problem(23)
    assert_close(token_losses(head, hidden, targets, smoothing), by_hand(head, hidden, targets, smoothing))


@each_chunk
@each_smoothing
@pytest.mark.parametrize("count", [1, 4, 23])
def test_weighted_loss_and_all_its_gradients_equal_plain_autograd(count, smoothing, chunk, monkeypatch):
    limit(monkeypatch, chunk)
    head, hidden, targets, weights = problem(count)
    weights[-1] = 2.5
    expected, expected_gradients = oracle(head, hidden, targets, weights, smoothing)
    hidden.requires_grad_()
    loss = weighted_loss(head, hidden, targets, weights, VOCAB, smoothing)
    assert loss.shape == ()
    assert_close(loss.detach(), expected)
    loss.backward()
    for found, gradient in zip((hidden, head.linear.weight, head.linear.bias), expected_gradients, strict=True):
        assert_close(found.grad, gradient)
    assert max(head.sizes) == min(chunk or count, count)


def test_chunked_weighted_loss_trains_the_head_even_if_hidden_states_need_no_gradient(monkeypatch):
    limit(monkeypatch, 4)
    head, hidden, targets, weights = problem(23)
    _, (_, weight_gradient, bias_gradient) = oracle(head, hidden, targets, weights, 0.0)
    weighted_loss(head, hidden, targets, weights, VOCAB).backward()
    assert_close(head.linear.weight.grad, weight_gradient)
    assert_close(head.linear.bias.grad, bias_gradient)
    assert hidden.grad is None


@pytest.mark.parametrize(("chunk", "saves_logits"), [(4, False), (None, True)])
def test_logits_are_kept_for_the_backward_only_if_one_chunk_holds_them(chunk, saves_logits, monkeypatch):
    limit(monkeypatch, chunk)
    head, hidden, targets, weights = problem(23)
    saved = []

    def record(tensor):
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = weighted_loss(head, hidden.requires_grad_(), targets, weights, VOCAB)
    assert any(shape[-1:] == (VOCAB,) and len(shape) > 1 for shape in saved) is saves_logits
    assert max(head.sizes) == (chunk or 23)
    loss.backward()
    forwards = 2 if chunk else 1  # a chunk's logits are computed again
    assert sum(head.sizes) == forwards * 23


@each_chunk
@each_smoothing
@pytest.mark.parametrize("count", [1, 4, 23])
def test_losses_and_gradient_equal_plain_autograd(count, smoothing, chunk, monkeypatch):
    limit(monkeypatch, chunk)
    head, hidden, targets, _ = problem(count)
    _, (expected, _, _) = oracle(head, hidden, targets, torch.ones(count), smoothing)
    found, gradient = losses_and_gradient(head, hidden, targets, VOCAB, smoothing)
    assert_close(found, by_hand(head, hidden, targets, smoothing).detach())
    assert_close(gradient, expected)
    assert max(head.sizes) == min(chunk or count, count)


@each_chunk
def test_losses_and_gradient_leave_parameters_and_hidden_states_alone(chunk, monkeypatch):
    limit(monkeypatch, chunk)
    head, hidden, targets, _ = problem(23)
    before = hidden.clone()
    found, gradient = losses_and_gradient(head, hidden, targets, VOCAB)
    assert [parameter.grad for parameter in head.parameters()] == [None, None]
    assert all(parameter.requires_grad for parameter in head.parameters())
    assert torch.equal(hidden, before)
    assert not hidden.requires_grad
    assert hidden.grad is None
    assert not found.requires_grad
    assert not gradient.requires_grad


@each_chunk
def test_without_the_gradient_the_losses_are_the_same_and_no_graph_is_built(chunk, monkeypatch):
    limit(monkeypatch, chunk)
    head, hidden, targets, _ = problem(23)
    expected = by_hand(head, hidden, targets, 0.1).detach()
    enabled = []
    head.register_forward_hook(lambda module, inputs, output: enabled.append(output.requires_grad))
    found, gradient = losses_and_gradient(head, hidden, targets, VOCAB, 0.1, need_gradient=False)
    assert gradient is None
    assert_close(found, expected)
    assert set(enabled) == {False}


def test_the_gradient_is_found_under_no_grad_and_with_a_frozen_head():
    head, hidden, targets, _ = problem(9)
    _, (expected, _, _) = oracle(head, hidden, targets, torch.ones(9), 0.0)
    head.requires_grad_(False)
    with torch.no_grad():
        _, gradient = losses_and_gradient(head, hidden, targets, VOCAB)
        assert not torch.is_grad_enabled()
    assert_close(gradient, expected)


def test_low_precision_logits_give_float32_losses_and_a_gradient_in_the_dtype_of_the_hidden_states():
    head, hidden, targets, weights = problem(23, dtype=torch.bfloat16)
    logits = head(hidden[None])[0].float()
    expected = torch.logsumexp(logits, -1) - logits[torch.arange(23), targets]
    found, gradient = losses_and_gradient(head, hidden, targets, VOCAB)
    assert (found.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    assert torch.allclose(found, expected.detach(), rtol=1e-6, atol=1e-6)
    loss = weighted_loss(head, hidden, targets, weights, VOCAB)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float((expected.detach() * weights).sum()), rel=1e-5)


def test_no_positions_give_a_zero_loss_that_can_be_differentiated():
    head, hidden, targets, weights = problem(0)
    loss = weighted_loss(head, hidden.requires_grad_(), targets, weights, VOCAB)
    loss.backward()
    assert loss == 0
    assert head.linear.weight.grad.abs().sum() == 0
    found, gradient = losses_and_gradient(head, hidden.detach(), targets, VOCAB)
    assert (found.shape, gradient.shape) == ((0,), (0, WIDTH))


@pytest.mark.parametrize("chunk", [3 * VOCAB, 1000 * VOCAB])
def test_statistics_count_every_position_once_also_if_its_chunk_is_recomputed(chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", 1)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", chunk)
    head, hidden, targets, weights = problem(10)
    statistics = TokenStatistics()
    weighted_loss(head, hidden.requires_grad_(), targets, weights, VOCAB, statistics=statistics).backward()
    with torch.no_grad():
        probabilities = head(hidden[None])[0].softmax(-1)
    entropy = -sum(p * p.log() for row in probabilities for p in row)
    right = sum(int(row.argmax() == target) for row, target in zip(probabilities, targets, strict=True))
    assert statistics.n_positions == 10
    assert statistics.n_correct == right
    assert abs(statistics.entropy_sum - entropy) < 1e-9 * entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@each_smoothing
def test_losses_and_logit_gradient_equal_torchs_cross_entropy(dtype, scale, smoothing):
    logits = (torch.randn(7, VOCAB) * scale).to(dtype)
    logits[0, 3] = -torch.inf if smoothing == 0 else 0.0  # a forbidden token
    targets = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    upcast = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected = torch.nn.functional.cross_entropy(upcast, targets, reduction="none", label_smoothing=smoothing)
    (at_logits,) = torch.autograd.grad(expected.sum(), upcast)
    found, gradient = losses.losses_and_logit_gradient(logits, targets, smoothing)
    precision = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected.detach(), rtol=precision, atol=precision * scale)
    torch.testing.assert_close(gradient, at_logits, rtol=precision, atol=precision)


def test_a_chunk_is_of_a_size_for_caches_but_not_of_few_positions():
    assert losses.chunk_size(49_152) == 170 and losses.chunk_size(256_000) == 128


@pytest.mark.parametrize(
    "positions, sizes", [(0, [0]), (1, [1]), (4, [4]), (5, [3, 2]), (9, [3, 3, 3]), (13, [4, 3, 3, 3])]
)
def test_chunks_are_of_one_size_and_lose_nothing(monkeypatch, positions, sizes):
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", 4)
    hidden, targets = torch.arange(positions * 2).view(positions, 2), torch.arange(positions)
    chunks = losses.chunked(2**23, hidden, targets)
    assert [len(t) for _, t in chunks] == [len(h) for h, _ in chunks] == sizes
    assert torch.equal(torch.cat([h for h, _ in chunks]), hidden)
    assert torch.equal(torch.cat([t for _, t in chunks]), targets)
