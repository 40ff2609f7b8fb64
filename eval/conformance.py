"""Which of transformers' causal language models train exactly: the ditch gradient of each against the detach oracle.

    python eval/conformance.py --output eval/results/conformance.json [--families llama,qwen3]

Every family of the causal-LM mapping gets a tiny random model (tiny_configs.py), in float64 where it runs. What a user
would see happens first: the structure is inspected and the self-check runs; what they refuse counts as refused, with the
user's sentence. Hybrid families are tried a second time with attention layers only. Then the gradient of every parameter is compared with the oracle of tokenseek_trainer/testing.py.
"""

import argparse
import contextlib
import logging
import signal
import time
import warnings
from pathlib import Path

import torch
from tiny_configs import ATTENTION_ONLY, N_LAYERS, WINDOW, NotBuilt, tiny_family_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.errors import SelfCheckError, UnsupportedModelError
from tokenseek_trainer.evaluation import save_result
from tokenseek_trainer.objective import OWN_LABELS
from tokenseek_trainer.provenance import provenance
from tokenseek_trainer.routing import COEFFICIENTS
from tokenseek_trainer.selection import TokenSelection, select
from tokenseek_trainer.selfcheck import self_check
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.structure import inspect_model
from tokenseek_trainer.testing import (
    Float32AsFloat64,
    gradients,
    oracle_loss,
    packed_batch,
    ragged_batch,
    relative_error,
)


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


def check_family(family: str, **settings) -> dict:
    """{"outcome": "exact" | "refused" | "wrong" | "not built", ...} of one family, with other settings of its config."""
    try:
        with time_limit(SECONDS_PER_FAMILY):
            model, dtype = runnable_model(family, **settings)
            with upcasts_exact(dtype):
                found = check_model(model)
            if model.supports_gradient_checkpointing:
                found["errors"]["checkpointed"] = checkpointing_error(
                    model.float(), BATCHES["beyond the window"](), SELECTIONS["random"]
                )
            return judged(found, dtype)
    except NotBuilt as error:
        return {"outcome": "not built", "reason": str(error)}
    except (UnsupportedModelError, SelfCheckError) as error:
        return {"outcome": "refused", "reason": str(error)}
    except Exception as error:  # one family must not end the run; a crash of the product is its defect
        return {"outcome": "wrong", "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def runnable_model(family: str, **settings):
    """The tiny model in the best dtype in which its own forward runs, and that dtype."""
    problem = ""
    for dtype in TOLERANCE:
        model = tiny_family_model(family, dtype, SEED, **settings)
        inspect_model(model)
        try:
            with upcasts_exact(dtype):
                logits = stock_logits(model, BATCHES["beyond the window"]())
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            if logits.isfinite().all():
                return model, dtype
            problem = "its logits are not finite"
    raise NotBuilt(f"the tiny model's own forward fails: {problem}")


def check_model(model) -> dict:
    """Every batch with every selection, then the loss itself, then eager attention."""
    errors, refused = {}, {}
    structure = inspect_model(model)
    for batch_name, make in BATCHES.items():
        if batch_name == "packed" and not structure.forward_accepts("position_ids"):
            refused[batch_name] = "it takes no position_ids"
            continue
        check_batch(model, batch_name, make(), errors, refused)
    errors["stock loss"] = stock_loss_error(model, BATCHES["padded"]())
    if model.loss_function not in OWN_LABELS:
        errors["parts"] = parts_error(model, BATCHES["padded"](), SELECTIONS["random"])
    if has_router_loss(model):
        errors["router loss"] = router_loss_error(model, without_positions(ragged_batch((9, 16))))
    model.set_attn_implementation("eager")
    errors["eager"] = gradient_error(model, BATCHES["padded"](), SELECTIONS["random"])
    return {
        "errors": errors,
        "refused_cases": refused,
        "keeps_packed_documents_apart": "packed" not in refused and keeps_documents_apart(model, BATCHES["packed"]()),
        "told_that_packed_documents_mix": "packed" not in refused and told_of_mixing(model, BATCHES["packed"]()),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def judged(found: dict, dtype: torch.dtype) -> dict:
    worst = max(found["errors"].values(), key=lambda error: error if error == error else float("inf"))
    return {
        "outcome": "exact" if worst < TOLERANCE[dtype] else "wrong",
        "error": worst,
        "dtype": str(dtype).removeprefix("torch."),
        "tolerance": TOLERANCE[dtype],
        **found,
    }


def check_batch(model, batch_name: str, batch: dict, errors: dict, refused: dict) -> None:
    """The self-check, then the gradient under each selection. A model whose attention cannot be scored has the others."""
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


def gradient_error(model, batch: dict, config: TokenSeekConfig) -> float:
    """Greatest relative difference of any parameter's gradient, and of the loss, to the oracle's."""
    loss, instances, selection = ditch(model, batch, config)
    ditched = gradients(model)
    keep = torch.zeros(instances.ids.shape, dtype=torch.bool)
    weights = torch.zeros(instances.ids.shape, dtype=torch.float64)
    rows, slots = selection.mask.nonzero(as_tuple=True)
    keep[rows, selection.indices[rows, slots]] = True
    weights[rows, selection.indices[rows, slots]] = selection.weights[rows, slots]
    inputs = inspect_model(model).with_own_positions(batch)
    shift = inspect_model(model).shift
    expected = oracle_loss(model, inputs, keep, weights, instances.n_supervised.sum(), shift)
    expected.backward()
    error = relative_error(ditched, gradients(model))
    return max(error, float(abs(loss.detach() - expected.detach()) / abs(expected.detach())))


@torch.no_grad()
def stock_loss_error(model, batch: dict) -> float:
    """The seek pass's loss of all supervised tokens beside the loss of the model's own forward."""
    with TokenSeekSession(model, SELECTIONS["default"]) as session:
        instances = session.instances(batch)
        loss = session.seek(batch, instances).loss_sum / instances.n_supervised.sum()
    expected = model(**inspect_model(model).with_own_positions(batch), use_cache=False).loss
    return float(abs(loss - expected) / expected)


def parts_error(model, batch: dict, config: TokenSeekConfig) -> float:
    """Difference that running the kept tokens in three parts makes, which must be none."""
    loss, instances, selection = ditch(model, batch, config)
    whole = gradients(model)
    with TokenSeekSession(model, config) as session:
        session.seek(batch, instances, scoring=False)
        in_parts = ditch_in_parts(session, batch, instances, selection, 3)
    return max(relative_error(gradients(model), whole), float(abs(in_parts - loss.detach()) / abs(loss.detach())))


def ditch_in_parts(session, batch: dict, instances, selection: TokenSelection, count: int = 2) -> torch.Tensor:
    """Every part's ditch pass and backward after a seek; the sum of their losses."""
    parts, losses = selection.parts(count), []
    for number, part in enumerate(parts):
        loss = session.ditch(batch, instances, part, to_come=parts[number + 1 :])
        loss.backward()
        losses.append(loss.detach().double())
    return torch.stack(losses).sum()


def has_router_loss(model) -> bool:
    """Whether the model has an auxiliary loss of its experts' router, which is off by default."""
    return hasattr(model.config.get_text_config(), "output_router_logits") and any(
        hasattr(model, name) for name in COEFFICIENTS
    )


def router_loss_error(model, batch: dict) -> float:
    """With the auxiliary loss, all tokens in two parts: difference of loss and gradient to the model's own."""
    text_config = model.config.get_text_config()
    text_config.output_router_logits = True
    for name in COEFFICIENTS:  # the usual 0.001 would hide an error
        if hasattr(model, name):
            setattr(model, name, 1.0)
    with TokenSeekSession(model, SELECTIONS["paper"]) as session:
        instances = session.instances(batch)
        session.seek(batch, instances, scoring=False)
        recorded = len(session.routers.recorded)
        everything = TokenSelection(
            torch.arange(instances.ids.shape[1]).expand_as(instances.ids).clone(),
            instances.ids >= 0,
            instances.supervised.double(),
        )
        total = ditch_in_parts(session, batch, instances, everything)
    ours = gradients(model)
    output = model(**inspect_model(model).with_own_positions(batch), use_cache=False)
    output.loss.backward()
    text_config.output_router_logits = False
    if not recorded or output.aux_loss is None:
        return float("inf")
    error = relative_error(ours, gradients(model))
    return max(error, float(abs(total - output.loss.detach()) / abs(output.loss.detach())))


def checkpointing_error(model, batch: dict, config: TokenSeekConfig) -> float:
    """Difference that activation checkpointing makes, which must be none.

    It is not compared with the oracle, whose hooks are gone in the recomputation, as `Float32AsFloat64` is.
    """
    ditch(model, batch, config)
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ditch(model, batch, config)
    model.gradient_checkpointing_disable()
    return relative_error(gradients(model), plain)


def ditch(model, batch: dict, config: TokenSeekConfig):
    """One training step's passes and backward: loss, instances, selection."""
    with TokenSeekSession(model, config) as session:
        instances = session.instances(batch)
        found = session.seek(batch, instances)
        selection = select(found.scores(instances, config, 0), instances, config)
        loss = session.ditch(batch, instances, selection)
        loss.backward()
    return loss, instances, selection


def keeps_documents_apart(model, batch: dict) -> bool:
    """Whether each document of a packed row gets the logits that it gets alone."""
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    together = stock_logits(model, batch)[0]
    for start, end in zip(starts, [*starts[1:], len(together)], strict=True):
        alone = stock_logits(model, {name: value[:, start:end] for name, value in batch.items()})[0]
        if not torch.allclose(together[start:end], alone, rtol=1e-4, atol=1e-5):
            return False
    return True


def told_of_mixing(model, batch: dict) -> bool:
    """Whether a user would be warned that packed documents attend to each other."""
    with TokenSeekSession(model, SELECTIONS["default"]) as session:
        session.seek(batch, session.instances(batch), scoring=False)
        return session.attention.mixes_documents()


@torch.no_grad()
def stock_logits(model, batch: dict) -> torch.Tensor:
    """(B, n, V) of the ordinary training forward."""
    inputs = inspect_model(model).with_own_positions(batch)
    return model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False).logits


def upcasts_exact(dtype: torch.dtype):
    return Float32AsFloat64() if dtype == torch.float64 else contextlib.nullcontext()


@contextlib.contextmanager
def time_limit(seconds: int):
    """Processor time, so that a busy machine changes no outcome."""

    def stop(signum, frame):
        raise NotBuilt(f"not done within {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--families", help="comma-separated; all of the mapping if left out")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    families, started = {}, time.perf_counter()
    for family in options.families.split(",") if options.families else FAMILIES:
        families[family] = result = check_family(family)
        if family in ATTENTION_ONLY:
            result["attention_only"] = {
                "settings": ATTENTION_ONLY[family],
                **check_family(family, **ATTENTION_ONLY[family]),
            }
        print(f"{family:24} {result['outcome']:10}", result.get("error", result.get("reason", "")), flush=True)
        if "attention_only" in result:
            print(f"{'':24} with attention only {result['attention_only']['outcome']}", flush=True)
    outcomes = [result["outcome"] for result in families.values()]
    counts = {outcome: outcomes.count(outcome) for outcome in ("exact", "refused", "wrong", "not built")}
    attention_only = [
        result["attention_only"]["outcome"] for result in families.values() if "attention_only" in result
    ]
    counts["exact with attention only"] = attention_only.count("exact")
    counts["wrong"] += attention_only.count("wrong")
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
