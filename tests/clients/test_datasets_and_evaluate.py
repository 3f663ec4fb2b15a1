"""`datasets` streams into a Trainer, and `evaluate` scores with it, beside our metrics."""

import evaluate
import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, Trainer, TrainingArguments

from hf_xformers.metrics import compute
from tests.clients.checkpoints import TEXTS, build, tokenizer


def arguments(folder, **changes):
    fields = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True}
    return TrainingArguments(str(folder), **{**fields, "save_strategy": "no", "logging_steps": 1, **changes})


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((f"xf_{name}", "ForMaskedLM") for name in ("bert", "longformer", "switch_transformer")),
        *((f"xf_{name}", "ForCausalLM") for name in ("gpt2", "transformer_xl", "feedback_transformer")),
    ],
)
def test_streaming(name, head, tmp_path):
    """Rows are tokenized while they are read; transformers' own collator masks them."""
    words = tokenizer()

    def rows():
        for text in TEXTS * 3:
            yield {"text": text}

    stream = IterableDataset.from_generator(rows).map(lambda row: words(row["text"]), remove_columns=["text"])
    assert isinstance(stream, IterableDataset)
    torch.manual_seed(0)
    masked = head == "ForMaskedLM"
    trainer = Trainer(
        model=build(name, head),
        args=arguments(tmp_path),
        train_dataset=stream,
        data_collator=DataCollatorForLanguageModeling(words, mlm=masked, mlm_probability=0.5 if masked else None),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(0 < loss < 100 for loss in losses)


class Agreement(evaluate.Metric):
    """A metric of `evaluate` that is defined here, as the Hub's are out of reach in a test."""

    def _info(self):
        from datasets import Features, Value

        return evaluate.MetricInfo(
            description="share of equal labels",
            citation="",
            inputs_description="",
            features=Features({"predictions": Value("int32"), "references": Value("int32")}),
        )

    def _compute(self, predictions, references):
        return {"agreement": float(np.mean(np.array(predictions) == np.array(references)))}


@pytest.mark.parametrize("name", ["xf_bert", "xf_reformer", "xf_funnel_transformer", "xf_switch_transformer"])
def test_scores_of_a_trainer(name, tmp_path):
    words, metric = tokenizer(), Agreement(cache_dir=str(tmp_path))
    model, labels = build(name, "ForSequenceClassification"), [2, 0, 1, 2]
    rows = [{**words(text), "labels": label} for text, label in zip(TEXTS, labels)]

    def score(prediction):
        predictions = prediction.predictions
        logits = predictions[0] if isinstance(predictions, tuple) else predictions
        chosen = logits.argmax(-1)
        ours = compute("accuracy", chosen.tolist(), prediction.label_ids.tolist())
        return {**metric.compute(predictions=chosen, references=prediction.label_ids), **ours}

    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, per_device_eval_batch_size=2),
        eval_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorWithPadding(words),
        compute_metrics=score,
    )
    found = trainer.evaluate()
    with torch.no_grad():
        chosen = [model(words(text, return_tensors="pt").input_ids).logits.argmax().item() for text in TEXTS]
    expected = np.mean(np.array(chosen) == np.array(labels))
    assert found["eval_agreement"] == found["eval_accuracy"] == pytest.approx(expected)
