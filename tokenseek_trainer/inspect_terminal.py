"""The rows of a token report as text for a terminal."""

import dataclasses
import os
import sys
from typing import TYPE_CHECKING

from .config import TokenSeekConfig
from .scoring import combine


if TYPE_CHECKING:
    from .inspection import TokenRow


RESET = "\x1b[0m"
LIGHT_INK, DARK_INK = (240, 242, 245), (16, 20, 28)
CUBE = (0, 95, 135, 175, 215, 255)  # the channel values of the 256-colour palette
# Steps of the page's palette in dark mode, from the lowest score to the highest.
PALETTE = ((22, 32, 46), (22, 58, 99), (27, 96, 132), (54, 138, 138), (134, 180, 116), (245, 226, 110))


def has_color() -> bool:
    """Whether standard output is a terminal that is asked for colours (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def row_text(row: "TokenRow", config: TokenSeekConfig, step: int, color: bool) -> str:
    """A row: its tokens with the kept ones in «guillemets», or with `color` underlined, and all shaded by the score."""
    kept = set(row.kept(config, step))
    shades = _shades(row, config)
    names = {True: "text" if bool(row.response.all()) else "response", False: "prompt"}
    pieces, role = [], None
    for i, (text, response) in enumerate(zip(row.tokens, row.response.tolist(), strict=True)):
        if response != role:
            role = response
            pieces.append(f"\n{names[role]}: ")
        pieces.append(_token(text, i in kept, shades[i] if color else None))
    head = (
        f"row {row.number}: {len(row.tokens)} tokens, {int(row.supervised.sum())} with a loss, mean loss {row.loss:.3f}, "
        f"{len(kept)} kept"
    )
    return head + "".join(pieces) + "\n"


def _shades(row: "TokenRow", config: TokenSeekConfig) -> list[float]:
    """The score of the rule in [0, 1]; of random tokens, the gradient score."""
    scorer = "gradient" if config.scorer == "random" else config.scorer
    context = None if row.context is None else row.context[None]
    score = combine(context, row.gradient[None], row.instances, dataclasses.replace(config, scorer=scorer))[0]
    span = score.max() - score.min()
    return ((score - score.min()) / (span if span > 0 else 1)).tolist()


def _token(text: str, kept: bool, shade: float | None) -> str:
    core = text.lstrip(" ")
    lead, core = text[: len(text) - len(core)], printable(core)
    if shade is None:
        return f"{lead}«{core}»" if kept else lead + core
    shown = lead + core
    style = ";".join([*_background(shade), *(["1", "4"] if kept else [])])
    # Each line for itself: a background that is on at a line break runs to the edge of the terminal.
    return "\n".join(f"\x1b[{style}m{line}{RESET}" if line and style else line for line in shown.split("\n"))


def printable(text: str) -> str:
    """Control characters as symbols, so that no row can steer the terminal; line breaks stay, after their symbol."""
    shown = []
    for character in text:
        code = ord(character)
        if character == "\n":
            shown.append("\u21b5\n")
        elif code < 32:
            shown.append(chr(0x2400 + code))
        elif 127 <= code < 160:
            shown.append("\u2421")
        else:
            shown.append(character)
    return "".join(shown)


def _background(shade: float) -> list[str]:
    """The codes of background and ink; the lowest level has the terminal's own."""
    level = min(int(shade * len(PALETTE)), len(PALETTE) - 1)
    if level == 0:
        return []
    ink = DARK_INK if level > 3 else LIGHT_INK
    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        return ["48;2;{};{};{}".format(*PALETTE[level]), "38;2;{};{};{}".format(*ink)]
    return [f"48;5;{_of_256(*PALETTE[level])}", f"38;5;{_of_256(*ink)}"]


def _of_256(red: int, green: int, blue: int) -> int:
    """The nearest colour of the terminal's 6 x 6 x 6 cube."""
    return 16 + sum(
        step * min(range(6), key=lambda i: abs(CUBE[i] - value)) for step, value in ((36, red), (6, green), (1, blue))
    )
