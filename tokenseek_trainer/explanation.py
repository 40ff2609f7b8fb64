"""What the command says when a run ends in an error: one message, and an exit code."""

import errno
import re

from .errors import TokenSeekError


def explain(error: BaseException) -> tuple[str, int]:
    """What is said about an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted.", 130
    if not isinstance(error, TokenSeekError) and _disk_is_full(error):
        return (
            "No space left on the disk while a file was written. Free some, or give another folder with --output_dir; "
            "--resume goes on from the last whole checkpoint.\n"
            f"({type(error).__name__}: {error})"
        ), 2
    if isinstance(error, (TokenSeekError, OSError)):
        return str(error), 2
    hint = "(`--debug` shows where it came from.)"
    if type(error).__name__ == "OutOfMemoryError":
        hint = "(`tokenseek estimate RECIPE --gpu-memory SIZE` shows what fits.)"
    return f"{type(error).__name__}: {error}\n{hint}", 1


def _disk_is_full(error: BaseException | None) -> bool:
    """Also where another library has made an error of its own from the system's."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or re.search(r"No space left|os error 28", str(error)):
            return True
        if re.search(r"PytorchStreamWriter failed|inline_container.*unexpected pos", str(error)):  # of torch.save
            return True
        error = error.__cause__ or error.__context__
    return False
