"""Whether a model keeps the packed documents of a row apart: some stock masks do not read position_ids."""

import warnings

from .attention import MaskRule
from .instances import Instances


def mixes_documents(rules: list[MaskRule], instances: Instances) -> bool:
    """Whether the first token of a packed document may attend to the document before it, under any of the masks.

    Args:
        rules: the masks of an ordinary forward. With none the model masks by itself, which knows of no documents.

    Returns:
        False if no row holds two documents.
    """
    ids = instances.ids
    starts = (ids[:, 1:] != ids[:, :-1]) & (ids[:, 1:] >= 0) & (ids[:, :-1] >= 0)
    if not starts.any():
        return False
    row, before = starts.nonzero()[0].tolist()
    queries = ids.new_full((len(ids), 1), before + 1)
    return not rules or any(bool(rule.rows(queries)[row, 0, 0, before]) for rule in rules)


def warn_of_mixed_documents(model_type: str) -> None:
    warnings.warn(
        f"The stock forward of the {model_type!r} model does not keep packed documents apart: its masks do not read position_ids, so "
        "a document attends to those before it in its row. TokenSeek computes what that forward computes, and its gradient is exact "
        "for it. To keep documents apart give one a row (packing=False, or no packed position_ids).",
        stacklevel=2,
    )
