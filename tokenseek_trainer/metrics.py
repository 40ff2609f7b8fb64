"""Metrics of the `evaluate` library as a Trainer's `compute_metrics`."""

from .errors import ConfigError


def metrics_function(metrics: dict[str, dict | None]):
    """What a Trainer calls on the logits and labels of the held-out rows.

    Args:
        metrics: what `evaluate.load` takes (a hub name, or a folder that holds the metric's file, for which no network is
            needed), with the arguments of its `compute`.

    Returns:
        A function from an EvalPrediction to a dict, None if there are no metrics.

    Raises:
        ConfigError: the `evaluate` package is missing, or a metric is neither there nor on the hub.
    """
    if not metrics:
        return None
    try:
        import evaluate
    except ImportError:
        raise ConfigError(
            "evaluation.metrics need the evaluate package: pip install 'tokenseek-trainer[eval]'"
        ) from None
    loaded = {}
    for name, options in metrics.items():
        try:
            loaded[name] = (evaluate.load(name), options or {})
        except FileNotFoundError as error:
            raise ConfigError(
                f"The metric {name!r} cannot be loaded: {error} Give a folder that holds a file of its name, or go online."
            ) from None

    def compute(prediction) -> dict[str, float]:
        classes = prediction.predictions.argmax(-1)
        found: dict[str, float] = {}
        for metric, options in loaded.values():
            found |= metric.compute(predictions=classes, references=prediction.label_ids, **options)
        return found

    return compute
