"""Grading: classes in an order, of which a near one is better than a far one."""

from hf_xformers.finetuning import TextClassification, register_task


@register_task
class Grading(TextClassification):
    """Classes in the order of their names. Metrics: the mean distance of grades, and accuracy."""

    id = "grading"
    metric = "distance"
    metric_names = ("distance", "accuracy")
    less_is_better = True

    def score(self, rows):  # of predicted rows: what is measured
        grades = {name: grade for grade, name in enumerate(self.labels.names)}
        said, true = ([grades[row[side]] for row in rows] for side in ("prediction", "reference"))
        distance = sum(abs(a - b) for a, b in zip(said, true)) / len(rows)
        return {"distance": distance, **self.metric_of("accuracy", said, true)}
