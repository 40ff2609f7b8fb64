"""Which of transformers' causal language models train exactly: the ditch gradient of each against the detach oracle.

    python eval/conformance.py --output eval/results/conformance.json [--families llama,qwen3]

Every family of the causal-LM mapping gets a tiny random model (tiny_configs.py), in float64 where it runs. What a user
would see happens first: the structure is inspected and the self-check runs; what they refuse counts as refused, with the
user's sentence. Then the gradient of every parameter is compared with the oracle of tokenseek_trainer/testing.py.
"""

import argparse
import contextlib
import logging
import signal
import time
import warnings
from pathlib import Path

import torch
from tiny_configs import N_LAYERS, WINDOW, NotBuilt, tiny_family_model
from torch.overrides import TorchFunctionMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.errors import SelfCheckError, UnsupportedModelError
from tokenseek_trainer.evaluation import save_result
from tokenseek_trainer.provenance import provenance
from tokenseek_trainer.selection import select
from tokenseek_trainer.selfcheck import self_check
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.structure import inspect_model
from tokenseek_trainer.testing import gradients, oracle_loss, packed_batch, ragged_batch, relative_error


SEED = 0
SECONDS_PER_FAMILY = 90
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def without_positions(batch: dict) -> dict:
    """The model's own numbering of a batch that is padded on the right."""
    return {name: value for name, value in batch.items() if name != "position_ids"}


BATCHES = {
    "padded": lambda: without_positions(ragged_batch((9, 16, 1))),
    "padded left": lambda: ragged_batch((5, 12), left=True),
    "beyond the window": lambda: ragged_batch((4 * WINDOW,)),
    "packed": lambda: packed_batch((7, 13)),
}
SELECTIONS = {
    "random": TokenSeekConfig(ratio=0.3, scorer="random", selection="topk", select_from="all"),
    "default": TokenSeekConfig(),
    "paper": TokenSeekConfig.paper(ratio=0.3),
}
FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def check_family(family: str) -> dict:
    """{"outcome": "exact" | "refused" | "wrong" | "not built", ...} of one family."""
    warnings.filterwarnings("ignore")
    try:
        with time_limit(SECONDS_PER_FAMILY):
            model, dtype = runnable_model(family)
            exactly = Float32AsFloat64() if dtype == torch.float64 else contextlib.nullcontext()
            with exactly:
                return {"dtype": str(dtype).removeprefix("torch."), **check_model(model, TOLERANCE[dtype])}
    except NotBuilt as error:
        return {"outcome": "not built", "reason": str(error)}
    except (UnsupportedModelError, SelfCheckError) as error:
        return {"outcome": "refused", "reason": str(error)}


def runnable_model(family: str):
    """The tiny model in the best dtype in which its own forward runs, and that dtype."""
    problem = ""
    for dtype in (torch.float64, torch.float32):
        model = tiny_family_model(family, dtype, SEED)
        inspect_model(model)
        batch = BATCHES["beyond the window"]()
        exactly = Float32AsFloat64() if dtype == torch.float64 else contextlib.nullcontext()
        try:
            with exactly:
                logits = stock_logits(model, batch)
            if logits.isfinite().all():
                return model, dtype
            problem = "its logits are not finite"
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    raise NotBuilt(f"the tiny model's own forward fails: {problem}")


def check_model(model, tolerance: float) -> dict:
    errors, refused = {}, {}
    for batch_name, make in BATCHES.items():
        batch = make()
        if batch_name == "packed" and not keeps_documents_apart(model, batch):
            refused[batch_name] = "the stock forward does not keep packed documents apart"
            continue
        with TokenSeekSession(model, SELECTIONS["default"]) as session:
            self_check(session, batch, session.instances(batch))
        for name, config in SELECTIONS.items():
            case = f"{batch_name}, {name}"
            try:
                errors[case] = gradient_error(model, batch, config)
            except UnsupportedModelError as error:
                if not config.needs_context:
                    raise
                refused[case] = str(error)
    worst = max(errors.values(), key=lambda error: error if error == error else float("inf"))
    return {
        "outcome": "exact" if worst < tolerance else "wrong",
        "error": worst,
        "tolerance": tolerance,
        "errors": errors,
        "refused_cases": refused,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def gradient_error(model, batch: dict, config: TokenSeekConfig) -> float:
    """Greatest relative difference of any parameter's gradient, and of the loss, to the oracle's."""
    with TokenSeekSession(model, config) as session:
        instances = session.instances(batch)
        found = session.seek(batch, instances)
        selection = select(found.scores(instances, config, 0), instances, config)
        loss = session.ditch(batch, instances, selection)
        loss.backward()
    ditched = gradients(model)
    keep = torch.zeros(instances.ids.shape, dtype=torch.bool)
    weights = torch.zeros(instances.ids.shape, dtype=torch.float64)
    rows, slots = selection.mask.nonzero(as_tuple=True)
    keep[rows, selection.indices[rows, slots]] = True
    weights[rows, selection.indices[rows, slots]] = selection.weights[rows, slots]
    batch = session.structure.with_own_positions(batch)
    expected = oracle_loss(model, batch, keep, weights, instances.n_supervised.sum())
    expected.backward()
    error = relative_error(ditched, gradients(model))
    return max(error, float(abs(loss.detach() - expected.detach()) / abs(expected.detach())))


def keeps_documents_apart(model, batch: dict) -> bool:
    """Whether each document of a packed row gets the logits that it gets alone."""
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    together = stock_logits(model, batch)[0]
    for start, end in zip(starts, [*starts[1:], len(together)], strict=True):
        alone = stock_logits(model, {name: value[:, start:end] for name, value in batch.items()})[0]
        if not torch.allclose(together[start:end], alone, rtol=1e-4, atol=1e-5):
            return False
    return True


@torch.no_grad()
def stock_logits(model, batch: dict) -> torch.Tensor:
    """(B, n, V) of the ordinary training forward."""
    inputs = inspect_model(model).with_own_positions(batch)
    return model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False).logits


class Float32AsFloat64(TorchFunctionMode):
    """What a model computes in float32 by choice (norms, softmax, routers) is computed in float64.

    Otherwise its rounding, 1e-8 to 1e-6, would hide errors of that size in a float64 model.
    """

    def __enter__(self):
        self.default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *exception):
        torch.set_default_dtype(self.default_dtype)
        return super().__exit__(*exception)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextlib.contextmanager
def time_limit(seconds: int):
    def stop(signum, frame):
        raise NotBuilt(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--families", help="comma-separated; all of the mapping if left out")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    families, started = {}, time.perf_counter()
    for family in options.families.split(",") if options.families else FAMILIES:
        try:
            families[family] = check_family(family)
        except Exception as error:  # one family must not end the run; a crash of the product is its defect
            families[family] = {
                "outcome": "wrong",
                "reason": f"{type(error).__name__}: {' '.join(str(error).split())}",
            }
        result = families[family]
        print(f"{family:24} {result['outcome']:10}", result.get("error", result.get("reason", "")), flush=True)
    outcomes = [result["outcome"] for result in families.values()]
    counts = {outcome: outcomes.count(outcome) for outcome in ("exact", "refused", "wrong", "not built")}
    print(counts)
    conditions = {"seed": SEED, "layers": N_LAYERS, "window": WINDOW, "batches": list(BATCHES)}
    conditions["selections"] = {name: config.to_dict() for name, config in SELECTIONS.items()}
    save_result(
        {
            **provenance(),
            "conditions": conditions,
            "counts": counts,
            "seconds": time.perf_counter() - started,
            "families": families,
        },
        options.output,
    )


if __name__ == "__main__":
    main()
