"""The errors that TokenSeek raises. Each message says what was received, what is allowed and what to do."""


class TokenSeekError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(TokenSeekError, ValueError):
    """A setting (of `TokenSeekConfig` or of a recipe) is out of its range or unknown."""


class InputError(TokenSeekError, ValueError):
    """A batch or a data set cannot be trained on: labels are missing, token indices lie outside their row, ..."""


class UnsupportedModelError(TokenSeekError, ValueError):
    """The model, or the way it is combined with other features, cannot be trained with token ditching."""


class SelfCheckError(TokenSeekError, RuntimeError):
    """The ditch pass did not reproduce the ordinary forward, so its gradients would be wrong."""


def closest(name: str, allowed) -> str:
    """Return " Did you mean 'x'?" for the member of `allowed` nearest to `name`, or "" if none is near."""
    import difflib

    matches = difflib.get_close_matches(str(name), [str(a) for a in allowed], n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
