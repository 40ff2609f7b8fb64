"""Proof at run time: on a real batch, the ditch pass must reproduce the ordinary forward."""

import contextlib

import torch

from .errors import SelfCheckError
from .instances import Instances
from .patching import dropout_off
from .scoring import tokens_first
from .selection import TokenSelection
from .session import TokenSeekSession


ADVICE = (
    "Training with TokenSeek would give wrong gradients, so it stops here; use the ordinary Trainer for this model."
)


def self_check(session: TokenSeekSession, inputs: dict, instances: Instances) -> float | None:
    """Compare the two passes block by block, dropout off, at about half of the batch's tokens (at most 64 a row).

    What makes an architecture unsafe shows here: tokens that are mixed outside attention, positions that are not read
    from position_ids, a mask that is built in another way.

    Returns:
        The greatest relative difference of any block's output; None if every row is too short to leave a token out.

    Raises:
        SelfCheckError: they differ by more than rounding; names the model type and the first block that does.
    """
    with _watching(session, instances.ids.shape) as ordinary:
        found = session.seek(inputs, instances, scoring=False)
    assert found.instances is not None  # of a seek pass
    instances = found.instances
    selection = probe(instances)
    if not selection.mask.any():
        return None
    dtypes = {tensor.dtype for tensor in session.recorded()}
    with _watching(session, selection.mask.shape) as ditched, torch.no_grad(), dropout_off(session.structure.outer):
        try:
            loss = session.ditch(inputs, instances, selection)
        except torch.OutOfMemoryError:
            raise
        except (
            RuntimeError,
            AssertionError,
            IndexError,
            TypeError,
            AttributeError,
        ) as error:  # somewhere it counts on seeing all tokens
            raise SelfCheckError(
                f"The {session.structure.model_type!r} model does not run on a part of its tokens "
                f"({type(error).__name__}: {error}). {ADVICE}"
            ) from error
    ordinary = [selection.gather(hidden)[selection.mask] for hidden in ordinary]
    ditched = [hidden[selection.mask] for hidden in ditched]
    dtypes |= {hidden.dtype for hidden in ordinary}
    if session.attention.implementation == "eager":
        dtypes.add(
            torch.float32
        )  # in which transformers' eager functions take the softmax, whatever the model's dtype
    tolerance = max(map(_tolerance, dtypes))
    greatest = _compare(session.structure.model_type, ordinary, ditched, tolerance)
    if instances.per_row and found.loss_sum is not None:
        _compare_losses(session.structure.model_type, found.loss_sum / len(instances.ids), loss, tolerance)
    return greatest


def probe(instances: Instances, most: int = 64) -> TokenSelection:
    """About every second real token of the first three quarters of each row, at most `most` of them.

    In sequence classification also one that the head reads.
    """
    real = instances.ids >= 0
    place = real.long().cumsum(-1) - 1
    stride = max(2, -(-int(real.sum(-1).max()) // most))
    # The end of each row is left out too: what depends on the longest position must not be lost with it.
    early = place < 0.75 * real.sum(-1, keepdim=True)
    keep = real & early & (place % stride == stride - 1)
    if instances.per_row:
        keep = keep.scatter(1, instances.supervised.long().argmax(-1, keepdim=True), True)
    k = max(1, int(keep.sum(-1).max()))
    indices = torch.argsort(~keep, dim=1, stable=True)[:, :k]
    mask = keep.gather(1, indices)
    weights = (mask & instances.supervised.gather(1, indices)).double()
    return TokenSelection(torch.where(mask, indices, 0), mask, weights)


@contextlib.contextmanager
def _watching(session: TokenSeekSession, shape: tuple[int, ...]):
    """Collect the hidden states of `shape` tokens that enter the first block and leave every block; (*shape, E) each."""
    seen: list[torch.Tensor] = []

    def keep(hidden):
        at_tokens = tokens_first(hidden.detach(), shape)
        if at_tokens is None:
            raise SelfCheckError(
                f"The blocks of the {session.structure.model_type!r} model pass on hidden states of shape {tuple(hidden.shape)} "
                f"for {tuple(shape)} tokens, in which tokens cannot be told apart. {ADVICE}"
            )
        seen.append(at_tokens)

    def watch(block, args, kwargs, output):
        if block is session.structure.blocks[0]:
            keep(args[0] if args else kwargs["hidden_states"])
        keep(output[0] if isinstance(output, (tuple, list)) else output)

    with contextlib.ExitStack() as stack:
        for block in session.structure.blocks:
            stack.callback(block.register_forward_hook(watch, with_kwargs=True).remove)
        yield seen


def _compare(model_type: str, ordinary: list, ditched: list, tolerance: float) -> float:
    if len(ordinary) != len(ditched):
        raise SelfCheckError(
            f"The {model_type!r} model ran {len(ordinary) - 1} blocks in the ordinary forward and {len(ditched) - 1} in the "
            f"ditch pass. {ADVICE}"
        )
    worst = 0.0
    for layer, (a, b) in enumerate(zip(ordinary, ditched, strict=True)):
        error = float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-30))
        if not error <= tolerance:
            place = "at the embeddings" if layer == 0 else f"after block {layer - 1}"
            raise SelfCheckError(
                f"The ditch pass of this {model_type!r} model does not reproduce its ordinary forward: {place} the hidden "
                f"states of the same tokens differ by {error:.1e} of their norm (allowed {tolerance:.0e}). The model mixes "
                f"tokens outside attention, or does not read position_ids. {ADVICE}"
            )
        worst = max(worst, error)
    return worst


def _compare_losses(model_type: str, ordinary: torch.Tensor, ditched: torch.Tensor, tolerance: float) -> None:
    """A classifier's head must find in the ditch pass what it reads: the loss is that of the ordinary forward."""
    error = float(abs(ditched - ordinary) / abs(ordinary).clamp(min=1e-3))
    if not error <= tolerance:
        raise SelfCheckError(
            f"The head of this {model_type!r} model gives the loss {float(ditched):.6g} in the ditch pass and "
            f"{float(ordinary):.6g} in the ordinary forward: it reads tokens by another way than the decoder's hidden states. "
            f"{ADVICE}"
        )


def _tolerance(dtype: torch.dtype) -> float:
    """Allowed relative difference in the coarsest dtype of the forward: rounding, with room for many blocks.

    Parts of many models (norms, routers) compute in float32 whatever the dtype, so float64 is not exact to its own rounding.
    """
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 5e-2)
