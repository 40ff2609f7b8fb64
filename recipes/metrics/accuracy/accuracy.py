"""Accuracy, as a metric of the `evaluate` library that loads without network: evaluate.load("recipes/metrics/accuracy")."""

import datasets
import evaluate
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="The share of rows whose class is predicted rightly.",
            citation="",
            inputs_description="predictions, references: class numbers.",
            features=datasets.Features(
                {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
            ),
        )

    def _compute(self, predictions, references):
        return {"accuracy": float(accuracy_score(references, predictions))}
