"""F1, as a metric of the `evaluate` library that loads without network: evaluate.load("recipes/metrics/f1")."""

import datasets
import evaluate
from sklearn.metrics import f1_score


class F1(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="The harmonic mean of precision and recall.",
            citation="",
            inputs_description="predictions, references: class numbers; average: as for sklearn.metrics.f1_score.",
            features=datasets.Features(
                {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
            ),
        )

    def _compute(self, predictions, references, average="binary"):
        return {"f1": float(f1_score(references, predictions, average=average))}
