"""The loss of selected positions, and its gradient at the hidden states, without ever holding (tokens, vocabulary) logits.

Letters: S positions, E hidden width, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint


# Logits held at once, 32 MiB in float32, but at least this many positions: the head's weights are read once a chunk, which for fewer
# takes longer than their products.
CHUNK_LOGITS = 2**23
CHUNK_POSITIONS = 128

Head = Callable[[torch.Tensor], torch.Tensor]  # (1, s, E) hidden states -> (1, s, V) logits


def chunk_size(vocab_size: int) -> int:
    """Positions that go through the head at once."""
    return max(CHUNK_POSITIONS, CHUNK_LOGITS // vocab_size)


def chunked(vocab_size: int, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Tensors of S positions in chunks of about one size: for a few left over the head's weights would be read once more."""
    chunks = max(1, -(-len(tensors[0]) // chunk_size(vocab_size)))
    return list(zip(*(tensor.tensor_split(chunks) for tensor in tensors), strict=True))


class TokenStatistics:
    """Sums over scored positions: entropy of the predictions (nats), correct top predictions, positions."""

    def __init__(self):
        self.entropy_sum, self.n_correct, self.n_positions = 0.0, 0, 0

    @torch.no_grad()
    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """logits (S, V), targets (S,)."""
        log_probabilities = logits.log_softmax(-1)
        self.entropy_sum = self.entropy_sum - (log_probabilities.exp() * log_probabilities).sum()
        self.n_correct = self.n_correct + (logits.argmax(-1) == targets).sum()
        self.n_positions += len(targets)


def token_losses(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing: float = 0.0,
    statistics: TokenStatistics | None = None,
) -> torch.Tensor:
    """Cross-entropy of each position. hidden (S, E), targets (S,) -> (S,), float32 or better."""
    logits = head(hidden[None]).squeeze(0)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if statistics is not None:
        statistics.add(logits.detach(), targets)
    return cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)


def weighted_loss(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    vocab_size: int,
    label_smoothing: float = 0.0,
    statistics: TokenStatistics | None = None,
) -> torch.Tensor:
    """sum over positions of weight * cross-entropy, differentiable.

    With more logits than one chunk holds, each chunk's logits are recomputed in the backward instead of being kept.

    Args:
        hidden: (S, E); targets: (S,) int64; weights: (S,) float.
        statistics: is filled with those of these positions, unless None.
    """
    n_counted = 0

    def part(hidden, targets, weights, number):
        nonlocal n_counted
        counts_now = number == n_counted  # a recomputed chunk was counted already
        n_counted += counts_now
        losses = token_losses(head, hidden, targets, label_smoothing, statistics if counts_now else None)
        return (losses * weights.to(losses.dtype)).sum()

    chunks = chunked(vocab_size, hidden, targets, weights)
    if len(chunks) == 1:
        return part(hidden, targets, weights, 0)
    return torch.stack([checkpoint(part, *chunk, i, use_reentrant=False) for i, chunk in enumerate(chunks)]).sum()


def losses_and_gradient(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    label_smoothing: float = 0.0,
    need_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cross-entropy of each position, and the gradient of their sum at `hidden`; parameters get no gradient.

    Args:
        hidden: (S, E), detached; targets: (S,) int64.

    Returns:
        losses (S,) and gradient (S, E) in hidden's dtype, None unless asked for. Nothing of them is attached to a graph.
    """
    losses, gradients = [], []
    for h, t in chunked(vocab_size, hidden, targets):
        if not need_gradient:
            with torch.no_grad():
                losses.append(token_losses(head, h, t, label_smoothing))
            continue
        h = h.detach().requires_grad_()
        with torch.enable_grad():
            logits = head(h[None]).squeeze(0)
        loss, at_logits = losses_and_logit_gradient(logits.detach(), t, label_smoothing)
        gradients.append(torch.autograd.grad(logits, h, at_logits.to(logits.dtype))[0])
        losses.append(loss)
    return torch.cat(losses), torch.cat(gradients) if need_gradient else None


def losses_and_logit_gradient(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of each position, and the gradient of their sum at the logits, from one softmax.

    Autograd would keep the logarithms of the probabilities and pass over (S, V) numbers several times more.

    Args:
        logits: (S, V); targets: (S,) int64.

    Returns:
        losses (S,) and gradient (S, V), float32 or better.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets[:, None]
    gradient = logits.softmax(-1)
    log_sum = logits.amax(-1, keepdim=True) - gradient.amax(-1, keepdim=True).log()  # of exp(logits)
    losses = log_sum - (1 - label_smoothing) * logits.gather(-1, targets)
    gradient.scatter_add_(-1, targets, torch.full_like(losses, label_smoothing - 1))
    if label_smoothing:
        losses = losses - label_smoothing * logits.mean(-1, keepdim=True)
        gradient -= label_smoothing / logits.shape[-1]
    return losses[:, 0], gradient
