"""Write a file so that a reader sees all of it or nothing."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Write `text` beside `path`, then put it in its place; makes the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(partial, 0o666 & ~_umask())  # a temporary file is private
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
