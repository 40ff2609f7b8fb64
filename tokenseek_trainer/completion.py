"""Completion of the `tokenseek` command in a shell, made by shtab: subcommands, their options, and every setting of a recipe."""

import argparse

import shtab

from .config import CHOICES
from .recipe import SECTIONS, TRAINERS, setting_names


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script for "bash", "zsh" or "fish".

    Args:
        parser: of the command; settings of a recipe are added to its subcommands that take a recipe and settings.
    """
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest in ("recipe", "checkpoint", "model", "output", "results"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    for name in ("train", "score", "sweep"):
        _add_settings(commands.choices[name])
    return shtab.complete(parser, shell=shell)


def _add_settings(command: argparse.ArgumentParser) -> None:
    taken = {option for action in command._actions for option in action.option_strings}
    names = [(section, name) for section in SECTIONS for name in setting_names(section)]
    keys = [name for _, name in names]
    command.add_argument("--trainer", choices=TRAINERS, help="which trainer")
    for section, name in names:
        choices = CHOICES.get(name) if section == "tokenseek" else None
        options = [f"--{section}.{name}"]
        if keys.count(name) == 1 and f"--{name}" not in taken:
            options.append(f"--{name}")
        command.add_argument(*options, choices=choices, help=f"setting of {section}")
