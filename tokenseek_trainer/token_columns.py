"""Score a data set once, ahead of training: adds a `token_scores` or `token_indices` column."""

from .collator import TokenSeekCollator
from .config import TokenSeekConfig
from .selection import select
from .session import TokenSeekSession


def add_token_columns(
    model,
    examples: list[dict],
    config: TokenSeekConfig,
    *,
    column: str = "token_scores",
    batch_size: int = 1,
    pad_token_id: int | None = None,
) -> list[dict]:
    """Score encoded examples with a model as it is.

    Args:
        examples: dicts with `input_ids`, and `labels` where not every token is supervised.
        config: its scorer gives the scores, its ratio and selection rule the indices.
        column: "token_scores" (a float per token; importances if config.selection is "sample"), or "token_indices"
            (the kept positions, by the top-k or sampling rule at step 0).

    Returns:
        Copies of the examples with the column added, in the same order.
    """
    if column not in ("token_scores", "token_indices"):
        raise ValueError(f"column must be 'token_scores' or 'token_indices', got {column!r}.")
    device = next(model.parameters()).device
    scored = []
    with TokenSeekSession(model, config) as session:
        collator = TokenSeekCollator(pad_token_id=pad_token_id, labels_per_row=session.structure.loss_per_row)
        for start in range(0, len(examples), batch_size):
            part = examples[start : start + batch_size]
            batch = {name: tensor.to(device) for name, tensor in collator(part).items()}
            instances = session.instances(batch)
            found = session.seek(batch, instances)
            assert found.instances is not None  # of a seek pass
            instances = found.instances
            scores = found.scores(instances, config, step=0)
            if column == "token_scores":
                columns = [row[: len(e["input_ids"])].tolist() for row, e in zip(scores, part, strict=True)]
            else:
                chosen = select(scores, instances, config, causal=session.structure.shift)
                columns = [row[mask].tolist() for row, mask in zip(chosen.indices, chosen.mask, strict=True)]
            scored += [{**example, column: values} for example, values in zip(part, columns, strict=True)]
            session.records.clear()
    return scored
