"""Write docs/reference.md from the docstrings of the public names.

python docs/reference.py            rewrite docs/reference.md
python docs/reference.py --check    exit 1 if it is not what the docstrings say

A public name, or a public method that its class defines and no class above it has, must have a docstring.
"""

import argparse
import ast
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path

from transformers import Trainer

import tokenseek_trainer


PAGE = Path(__file__).resolve().parent / "reference.md"
# Public names that are not imported from the package itself: their module.
FURTHER = {
    "TokenSeekSession": "session",
    "select": "selection",
    "estimate": "estimate",
    "inspect_tokens": "inspection",
    "EvaluationCallback": "evaluation",
    "InspectCallback": "inspect_callback",
}
HEAD = """# Reference

The public names, from their docstrings (`python docs/reference.py` writes this page). Everything else may change in any version.
"""


def render_page() -> str:
    own = [name for name in tokenseek_trainer.__all__ if not name.startswith("__")]
    homes = {name: "tokenseek_trainer" for name in own}
    homes |= {name: f"tokenseek_trainer.{module}" for name, module in FURTHER.items()}
    entries = [render_entry(getattr(importlib.import_module(home), name), home) for name, home in homes.items()]
    contents = "\n".join(f"- [{name}](#{name.lower()})" for name in homes)
    return "\n".join(
        [HEAD, contents, "\n`tokenseek_trainer.__version__`: the installed version, a string.\n", *entries]
    )


def render_entry(thing, home: str) -> str:
    """A heading, how to import it, its signature and docstring; of a class also its methods."""
    name = thing.__name__
    parts = [f"## {name}\n", f"```python\nfrom {home} import {name}\n```\n", f"```text\n{call(name, thing)}\n```\n"]
    parts.append(to_markdown(docstring(thing, name)))
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_") and is_of_its_own(thing, member, value):
                full = f"{name}.{member}"
                shown = full if isinstance(value, property) else call(full, getattr(value, "__func__", value))
                parts.append(f"### {full}\n\n```text\n{shown}\n```\n")
                parts.append(to_markdown(docstring(value, full)))
    return "\n".join(parts)


def is_of_its_own(cls, member: str, value) -> bool:
    """Methods and properties; those that a class above has too only if they say something of their own."""
    if not (inspect.isfunction(value) or isinstance(value, (classmethod, property))):
        return False
    above = (*cls.__bases__, Trainer) if cls is tokenseek_trainer.TokenSeekMixin else cls.__bases__
    inherited = any(hasattr(base, member) for base in above)
    return not inherited or bool(value.__doc__)


def docstring(thing, name: str) -> str:
    text = thing.__doc__  # not getdoc, which would take one from a class above
    if not text or not text.strip():
        raise SystemExit(f"{name} is public and has no docstring.")
    return inspect.cleandoc(text)


def call(name: str, thing) -> str:
    return "\n".join(
        textwrap.wrap(f"{name}({signature(thing)})", 115, subsequent_indent="    ", break_on_hyphens=False)
    )


def signature(thing) -> str:
    """The arguments as the source writes them."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    if not isinstance(node, ast.ClassDef):
        return arguments(node)
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    if methods:
        return arguments(methods[0])
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    if fields:
        return ", ".join(ast.unparse(field).replace(" = ", "=") for field in fields)
    return next((signature(base) for base in thing.__bases__ if base.__module__.startswith("tokenseek_trainer")), "")


def arguments(node: ast.FunctionDef) -> str:
    if node.args.args and node.args.args[0].arg in ("self", "cls"):
        node.args.args.pop(0)
    return ast.unparse(node.args)


def to_markdown(text: str) -> str:
    """A docstring as Markdown: a line that ends in a colon and the indented lines below it become a list."""
    out, fenced, section = [], False, False
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        bare = line.strip()
        if bare.startswith("```"):
            fenced = not fenced
        if fenced or bare.startswith("```"):
            out.append(line)
        elif not bare:
            out.append("")
        elif indent == 0:
            section = bare.endswith(":")
            out.append(f"**{bare}**\n" if re.fullmatch(r"\w+:", bare) else bare + ("\n" if section else ""))
        elif indent == 4 and section:
            out.append("- " + as_code(bare))
        else:
            out[-1] += " " + bare
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip() + "\n"


def as_code(item: str) -> str:
    """`name: text`, with the name, or names, as code."""
    names, colon, rest = item.partition(":")
    if colon and re.fullmatch(r"[\w./]+(, [\w./]+)*", names):
        return f"`{names}`:{rest}"
    return item


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is not up to date")
    check, page = parser.parse_args().check, render_page()
    if check:
        current = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        if page != current:
            print("docs/reference.md is not what the docstrings say: run python docs/reference.py", file=sys.stderr)
        return int(page != current)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
