"""What ships with the library: recipes with their data, and samples of the evaluation sets.

In a checkout they lie in `recipes/` and `eval/samples/`, in an installation inside the package.
"""

import shutil
from pathlib import Path

import yaml

from .errors import ConfigError, closest


PACKAGE = Path(__file__).parent


def recipes_folder() -> Path:
    """The folder of the shipped recipes."""
    return _first_that_exists(PACKAGE / "recipes", PACKAGE.parent / "recipes")


def samples_folder() -> Path:
    """The folder of the evaluation samples, laid out as `--data` wants it."""
    return _first_that_exists(PACKAGE / "samples", PACKAGE.parent / "eval" / "samples")


def _first_that_exists(installed: Path, checkout: Path) -> Path:
    return installed if installed.is_dir() else checkout


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def names_recipe(text: str) -> bool:
    """Whether a text that may also name a model names a recipe: a YAML file, or a shipped one unless such a path exists."""
    return text.endswith((".yaml", ".yml")) or (text in recipe_names() and not Path(text).exists())


def find_recipe(recipe: str | Path | None, settings: list[str] | tuple[str, ...] = ()) -> Path:
    """The file of a recipe, given as a path or as the name of a shipped one.

    Args:
        settings: what else is on the command line, to tell a recipe left out from one that does not exist.

    Raises:
        ConfigError: there is no such recipe.
    """
    if recipe is None:
        raise ConfigError(f"A recipe is missing: a YAML file, or one that ships: {', '.join(recipe_names())}.")
    path = Path(recipe)
    if path.is_file():
        return path
    shipped = recipes_folder() / f"{recipe}.yaml"
    if str(recipe) in recipe_names():
        return shipped
    if path.suffix not in (".yaml", ".yml") and settings:
        raise ConfigError(
            f"The recipe comes first, then settings: RECIPE.yaml --key value. Got {str(path)!r} as the recipe."
        )
    there = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    nearby = f" {path.parent} holds: {', '.join(there)}." if there else ""
    raise ConfigError(
        f"The recipe {path} does not exist.{closest(path.stem, recipe_names())}{nearby} `tokenseek recipes` lists those that ship."
    )


def describe_recipes() -> dict[str, str]:
    """The first line of each shipped recipe's head, by name."""
    return {name: _head(recipes_folder() / f"{name}.yaml") for name in recipe_names()}


def _head(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def copy_recipe(name: str, folder: str | Path) -> list[Path]:
    """Copy a shipped recipe, and the data files that it reads, into a folder; returns the files written.

    Raises:
        ConfigError: no recipe of that name ships, or one of the files is there already.
    """
    if name not in recipe_names():
        raise ConfigError(
            f"No recipe {name!r} ships.{closest(name, recipe_names())} There are: {', '.join(recipe_names())}."
        )
    source = recipes_folder() / f"{name}.yaml"
    data = yaml.safe_load(source.read_text(encoding="utf-8"))["data"]
    files = [Path(source.name), *(Path(data[key]) for key in ("train", "eval") if data.get(key))]
    files = [file for file in files if (recipes_folder() / file).is_file()]
    there = [str(Path(folder) / file) for file in files if (Path(folder) / file).exists()]
    if there:
        raise ConfigError(f"{there[0]} is there already. Give another folder with --to, or remove it.")
    for file in files:
        (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(recipes_folder() / file, Path(folder) / file)
    return [Path(folder) / file for file in files]
