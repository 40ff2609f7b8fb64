"""How near the gradient of the kept tokens comes to that of all tokens, per selection rule, on real rows.

    python eval/estimators.py --output eval/results/estimators.json

One row at a time, at the untrained model: cosine and relative error of a row's gradient, and of the sum over all rows, in which
the noise of drawing averages out and a rule's bias stays. A cheap forecast of the learning curves of eval/fidelity.py.
"""

import argparse
from pathlib import Path

import torch

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.evaluation import save_result
from tokenseek_trainer.provenance import provenance
from tokenseek_trainer.recipe import load_recipe
from tokenseek_trainer.run import load_examples, load_model, load_tokenizer
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession


RECIPE = Path(__file__).resolve().parent / "fidelity" / "gsm8k.yaml"
RANDOM = {"scorer": "random", "selection": "topk"}
RULES = {
    "sampled by gradient": TokenSeekConfig(),
    "sampled by gradient, half uniform": TokenSeekConfig(uniform_share=0.5),
    "sampled by gradient, not uniform": TokenSeekConfig(uniform_share=0.0),
    "sampled by gradient from all tokens": TokenSeekConfig(select_from="all"),
    "random supervised tokens": TokenSeekConfig(**RANDOM),
    "random tokens": TokenSeekConfig(select_from="all", **RANDOM),
    "top by gradient": TokenSeekConfig(selection="topk"),
    "the paper's rule": TokenSeekConfig.paper(),
    "sampled by gradient, ratio 0.05": TokenSeekConfig(ratio=0.05),
    "sampled by gradient, ratio 0.2": TokenSeekConfig(ratio=0.2),
    "sampled by gradient, ratio 0.3": TokenSeekConfig(ratio=0.3),
}


def gradient(model) -> torch.Tensor:
    """All gradients in one vector, which are cleared."""
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def full_gradient(model, batch) -> torch.Tensor:
    model(**batch, use_cache=False).loss.backward()
    return gradient(model)


def kept_gradient(model, batch, config, step) -> torch.Tensor:
    with TokenSeekSession(model, config) as session:
        instances = session.instances(batch)
        found = session.seek(batch, instances)
        selection = select(found.scores(instances, config, step), instances, config, step=step)
        session.ditch(batch, instances, selection).backward()
    return gradient(model)


def inner(a: torch.Tensor, b: torch.Tensor) -> float:
    """Inner product in float64: float32 sums over all weights of a model are off by percents."""
    pieces = zip(a.split(2**16), b.split(2**16), strict=True)
    return sum(float(torch.dot(x.double(), y.double())) for x, y in pieces)


def norm(a: torch.Tensor) -> float:
    return inner(a, a) ** 0.5


def compare(estimate, exact) -> tuple[float, float]:
    """Cosine and relative error."""
    return inner(estimate, exact) / (norm(estimate) * norm(exact)), norm(estimate - exact) / norm(exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("settings", nargs="*", help="settings of the recipe, after --")
    options = parser.parse_args()
    recipe = load_recipe(RECIPE, options.settings)
    tokenizer = load_tokenizer(recipe)
    model = load_model(recipe).train()
    rows, total, sums = {name: [] for name in RULES}, 0, dict.fromkeys(RULES, 0)
    for step, example in enumerate(load_examples(recipe, tokenizer)[: options.rows]):
        batch = {key: torch.tensor([example[key]]) for key in ("input_ids", "labels")}
        exact = full_gradient(model, batch)
        total = total + exact
        for name, config in RULES.items():
            kept = kept_gradient(model, batch, config, step)
            rows[name].append(compare(kept, exact))
            sums[name] = sums[name] + kept
        print(f"row {step + 1} of {options.rows}", flush=True)
    result = {
        "benchmark": "estimators",
        "conditions": {"rows": options.rows, "recipe": recipe.to_dict(), "dtype": "float32", "seed": 0},
        "rules": {
            name: {
                "row_cosine": sum(cosine for cosine, _ in found) / len(found),
                "row_relative_error": sum(error for _, error in found) / len(found),
                **dict(zip(("sum_cosine", "sum_relative_error"), compare(sums[name], total), strict=True)),
                "sum_relative_norm": norm(sums[name]) / norm(total),
            }
            for name, found in rows.items()
        },
        **provenance(),
    }
    save_result(result, options.output)


if __name__ == "__main__":
    main()
