"""The `tokenseek` command."""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .explanation import explain
from .files import write_whole
from .shipped import copy_recipe, describe_recipes, find_recipe, names_recipe, samples_folder


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand.

    Returns 0; 2 for bad input and 1 for an error of another library, with one message and no traceback; 130 if interrupted.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 2
    try:
        return options.run(options, rest) or 0
    except (Exception, KeyboardInterrupt) as error:
        if options.debug:
            raise
        message, code = explain(error)
        print(f"tokenseek: {message}", file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenseek", description="Fine-tune on the tokens that matter.", allow_abbrev=False
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    debug: dict[str, Any] = {"action": "store_true", "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train by a recipe",
        allow_abbrev=False,
        description="Train by a recipe. Any setting of it can be given as --section.key value, or --key value where only "
        "one section has the key; the command line wins.",
    )
    train.add_argument(
        "recipe",
        nargs="?",
        help="a YAML file with the sections model, data, tokenseek and training, or the name of a shipped recipe",
    )
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in output_dir")
    train.set_defaults(run=_train)

    score = commands.add_parser(
        "score",
        help="score a data set once, ahead of training",
        allow_abbrev=False,
        description="Write the recipe's training rows, encoded, with a column of token scores or kept token indices.",
    )
    score.add_argument("recipe", nargs="?", help="as for train")
    score.add_argument("-o", "--output", required=True, help="the .jsonl file to write")
    score.add_argument("--column", choices=("token_scores", "token_indices"), default="token_scores")
    score.set_defaults(run=_score)

    evaluate = commands.add_parser(
        "eval",
        help="evaluate a checkpoint with lm-evaluation-harness",
        allow_abbrev=False,
        description="Evaluate a full checkpoint or an adapter folder, and save one JSON.",
    )
    evaluate.add_argument("checkpoint", help="a folder or hub name")
    evaluate.add_argument("--suite", default="paper", help="paper, quick, or TASK[:SHOTS],... (default: paper)")
    evaluate.add_argument("--limit", type=int, help="questions per task; marks the result as limited")
    evaluate.add_argument(
        "--data", help="folder with local copies of the data, or `samples` for those that ship; default: the hub"
    )
    evaluate.add_argument("--batch-size", type=int, default=8)
    evaluate.add_argument("--dtype", default="auto", help="auto (as saved), float32, bfloat16 or float16")
    evaluate.add_argument("--chat-template", action="store_true", help="ask through the model's chat template")
    evaluate.add_argument("-o", "--output", help="default: CHECKPOINT/eval_SUITE.json")
    evaluate.set_defaults(run=_evaluate)

    estimate = commands.add_parser(
        "estimate",
        help="what memory a run will need, before it",
        allow_abbrev=False,
        description="Estimate the memory of a training step from the model's config alone: no weights, no GPU. Rows are full and "
        "every position is supervised; what the device's own runtime and fragmentation take comes on top.",
    )
    estimate.add_argument(
        "model",
        help="a recipe (.yaml, or the name of a shipped one), a folder, a config.json, a shipped config or a hub name",
    )
    estimate.add_argument("--seq", type=int, help="tokens of a row (default: 2048, or the recipe's)")
    estimate.add_argument("--batch", type=int, help="rows of a micro-batch (default: 1, or the recipe's)")
    estimate.add_argument("--ratio", type=float, help="fraction of tokens kept (default: 0.1, or the recipe's)")
    estimate.add_argument("--parts", type=int, help="parts of the ditch pass (default: 1, or the recipe's)")
    estimate.add_argument("--scorer", help="default: gradient, or the recipe's")
    estimate.add_argument("--method", help="full, lora, loha or qlora (default: full, or the recipe's)")
    estimate.add_argument("--optim", help="optimizer, as TrainingArguments name it (default: adamw_torch_fused)")
    estimate.add_argument("--dtype", help="of the weights: bf16, fp16 or fp32 (default: bf16)")
    estimate.add_argument("--autocast", action="store_true", default=None, help="bfloat16 autocast (bf16: true)")
    estimate.add_argument("--gpu-memory", help="e.g. 24GiB: also say what fits")
    estimate.set_defaults(run=_estimate)

    inspect = commands.add_parser(
        "inspect",
        help="see which tokens a model would learn from",
        allow_abbrev=False,
        description="Score a few rows and show which of their tokens are kept: on the terminal, or with -o as a page. Settings of "
        "the rule can be given as --key value.",
    )
    inspect.add_argument(
        "model",
        help="a folder or hub name; or a recipe (.yaml, or a shipped one's name), for its model, rows and rule",
    )
    inspect.add_argument("--text", action="append", default=[], help="a text to look at; can be repeated")
    inspect.add_argument("--data", help="a .jsonl or .json file, or a hub name (default: the recipe's training data)")
    inspect.add_argument("--rows", help="which rows of the data, START:STOP (default: 0:8)")
    inspect.add_argument("--recipe", help="take templates and rule from this recipe")
    inspect.add_argument(
        "--dtype", help="auto (as saved), float32, bfloat16 or float16 (default: the recipe's, or auto)"
    )
    inspect.add_argument("-o", "--output", help="the .html page to write; default: print to the terminal")
    inspect.set_defaults(run=_inspect)

    sweep = commands.add_parser(
        "sweep",
        help="run a grid of settings of a recipe",
        allow_abbrev=False,
        description="Run a recipe once per combination: a setting with commas (--ratio 0.1,0.2) is an axis. Finished cells are "
        "skipped, so a stopped sweep goes on where it was. Writes table.md, sweep.json and plots into the output folder.",
    )
    sweep.add_argument("recipe", nargs="?", help="as for train")
    sweep.add_argument("-o", "--output", help="folder of the sweep (default: runs/sweep-RECIPE)")
    sweep.add_argument("--seeds", help="comma-separated seeds of training and selection, e.g. 0,1,2")
    sweep.add_argument(
        "--case",
        action="append",
        metavar="NAME=SETTINGS",
        help="a named point that sets several keys, e.g. --case 'random=--scorer random --selection topk'; can be repeated",
    )
    sweep.add_argument("--suite", help="also evaluate every trained model: paper, quick, or TASK[:SHOTS],...")
    sweep.add_argument("--limit", type=int, help="questions per task of the evaluation")
    sweep.add_argument("--data", dest="eval_data", help="folder with local copies of the evaluation data")
    sweep.add_argument("--keep-models", action="store_true", help="keep every trained model")
    sweep.set_defaults(run=_sweep)

    report = commands.add_parser(
        "report", help="make a table of several results of `tokenseek eval`", allow_abbrev=False
    )
    report.add_argument("results", nargs="+", help="JSON files; the first is what the others are compared with")
    report.set_defaults(run=_report)

    recipes = commands.add_parser(
        "recipes",
        help="list the shipped recipes, or copy one",
        allow_abbrev=False,
        description="List the recipes that ship. With a name: copy it, and the data that it reads, to change it.",
    )
    recipes.add_argument("name", nargs="?", help="the recipe to copy")
    recipes.add_argument("--to", default=".", metavar="FOLDER", help="where to (default: here)")
    recipes.set_defaults(run=_recipes)

    doctor = commands.add_parser(
        "doctor",
        help="what is installed and what works, to paste into a bug report",
        allow_abbrev=False,
        description="Show versions, the device, and which optional parts are usable; takes one training step of a tiny model. "
        "No network. Exit code 1 if training cannot work.",
    )
    doctor.set_defaults(run=_doctor)

    completion = commands.add_parser(
        "completion",
        help="print a script for the shell's completion",
        allow_abbrev=False,
        description="Print a completion script, with every setting of a recipe. "
        "bash: tokenseek completion bash > ~/.local/share/bash-completion/completions/tokenseek; "
        "zsh: into a file _tokenseek in a folder of $fpath; fish: > ~/.config/fish/completions/tokenseek.fish",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run=_completion)

    for command in commands.choices.values():
        command.add_argument("--debug", **debug)
    return parser


def _train(options, rest) -> None:
    find_recipe(options.recipe, rest)  # before anything slow is imported
    from .recipe import load_recipe
    from .run import format_summary, train

    summary = train(load_recipe(options.recipe, rest), resume=options.resume)
    if os.environ.get("RANK", "0") == "0":  # under a launcher every process gets here
        print(format_summary(summary))


def _score(options, rest) -> None:
    find_recipe(options.recipe, rest)
    from .recipe import load_recipe
    from .run import load_examples, load_model, load_tokenizer
    from .token_columns import add_token_columns

    recipe = load_recipe(options.recipe, rest)
    tokenizer = load_tokenizer(recipe)
    examples = load_examples(recipe, tokenizer)
    scored = add_token_columns(
        load_model(recipe), examples, recipe.tokenseek, column=options.column, pad_token_id=tokenizer.pad_token_id
    )
    output = Path(options.output)
    write_whole(output, "".join(json.dumps(example) + "\n" for example in scored))
    print(f"wrote {len(scored)} rows with {options.column} to {output}")


def _evaluate(options, rest) -> None:
    from .evaluation import evaluate, load_checkpoint, parse_suite, save_result

    _refuse_rest(rest)
    parse_suite(options.suite)  # a misspelt suite is refused before the model is loaded
    output = options.output or str(
        Path(options.checkpoint) / f"eval_{options.suite.replace(',', '_').replace(':', '-')}.json"
    )
    data = options.data
    if data == "samples" and not Path(data).is_dir():
        data = samples_folder()
    model, tokenizer = load_checkpoint(options.checkpoint, options.dtype)
    result = evaluate(
        model,
        tokenizer,
        options.suite,
        limit=options.limit,
        data=data,
        batch_size=options.batch_size,
        apply_chat_template=options.chat_template,
        identity=options.checkpoint,
    )
    save_result(result, output)
    for task, entry in result["tasks"].items():
        error = "" if entry["stderr"] is None else f" ± {entry['stderr']:.2f}"
        print(f"{task:16} {entry['metric']:9} {entry['value']:6.2f}{error}  ({entry['questions']} questions)")
    limited = "  (limited: not a result)" if result["limited"] else ""
    print(f"{'average':26} {result['average']:6.2f}{limited}\nsaved to {output}")


def _estimate(options, rest) -> None:
    from .config import TokenSeekConfig
    from .estimate import load_config
    from .memory_plan import Plan, estimate_lines, parse_bytes, plan_of_recipe
    from .recipe import load_recipe

    if names_recipe(options.model):
        plan = plan_of_recipe(load_recipe(options.model, rest))
    else:
        _refuse_rest(rest)
        plan = Plan(load_config(options.model), TokenSeekConfig(), tokens=2048)
    changes = {
        "tokens": options.seq,
        "batch": options.batch,
        "method": options.method,
        "optim": options.optim,
        "dtype": options.dtype,
        "autocast": options.autocast,
    }
    plan = dataclasses.replace(plan, **{k: v for k, v in changes.items() if v is not None})
    given = {"ratio": options.ratio, "parts": options.parts, "scorer": options.scorer}
    method = {k: v for k, v in given.items() if v is not None}
    plan = dataclasses.replace(plan, tokenseek=dataclasses.replace(plan.tokenseek, **method))
    memory = parse_bytes(options.gpu_memory) if options.gpu_memory else None
    parts = f" in {plan.tokenseek.parts} parts" if plan.tokenseek.parts > 1 else ""
    print(
        f"{options.model}: {plan.method}, {plan.batch} x {plan.tokens} tokens, {plan.dtype}, {plan.optim}, ratio "
        f"{plan.tokenseek.ratio:g}{parts}; GiB per device\n"
    )
    for line in estimate_lines(plan, memory):  # to search what fits takes a while
        print(line, flush=True)


def _inspect(options, rest) -> None:
    from .inspect_inputs import Request, run_request

    report = run_request(
        Request(
            options.model,
            options.text,
            options.data,
            options.rows,
            options.recipe,
            options.output,
            options.dtype,
            rest,
        )
    )
    if options.output is None:
        print(report.to_terminal(), end="")
    else:
        report.save(options.output)
        print(f"wrote {len(report.rows)} rows to {options.output}")


def _sweep(options, rest) -> int:
    find_recipe(options.recipe, rest)
    from .sweep import grid, sweep

    try:
        seeds = [int(seed) for seed in options.seeds.split(",")] if options.seeds else None
    except ValueError:
        raise ConfigError(
            f"--seeds must be integers separated by commas, such as 0,1,2; got {options.seeds!r}."
        ) from None
    cases = dict(case.partition("=")[::2] for case in options.case or ())
    evaluation = [*(("--limit", str(options.limit)) if options.limit else ())]
    evaluation += ["--data", options.eval_data] if options.eval_data else []
    folder = Path(options.output or f"runs/sweep-{Path(options.recipe).stem}")
    failed = sweep(
        options.recipe,
        grid(rest, seeds, cases),
        folder,
        suite=options.suite,
        evaluation=tuple(evaluation),
        keep_models=options.keep_models,
    )
    if (folder / "table.md").is_file():
        print((folder / "table.md").read_text(encoding="utf-8"))
    if not (folder / "loss.svg").is_file():
        print("No plots: they need matplotlib (pip install 'tokenseek-trainer[sweep]') and a finished cell.")
    return 1 if failed else 0


def _report(options, rest) -> None:
    from .evaluation import report

    _refuse_rest(rest)
    print(report(options.results))


def _recipes(options, rest) -> None:
    _refuse_rest(rest)
    if options.name is not None:
        files = copy_recipe(options.name, options.to)
        print("\n".join(f"wrote {file}" for file in files))
        print(f"tokenseek train {files[0]}")
        return
    for name, head in describe_recipes().items():
        print(f"{name:26} {head}")
    print("\n`tokenseek train NAME` runs one as it is; `tokenseek recipes NAME` copies it here.")


def _doctor(options, rest) -> int:
    _refuse_rest(rest)
    from .doctor import examine

    return examine()


def _completion(options, rest) -> None:
    _refuse_rest(rest)
    from .completion import completion_script

    print(completion_script(_parser(), options.shell))


def _refuse_rest(rest: list[str]) -> None:
    if rest:
        raise ConfigError(f"Unknown argument {rest[0]!r}.")


if __name__ == "__main__":
    sys.exit(main())
