"""Gradient accumulation gives the step of one large batch, with transformers' own Trainer."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_xformers.variants import family

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def rows(head: str) -> list[dict]:
    """Rows whose losses are means over equally many targets, so that both ways mean the same."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(4):
        ids = torch.randint(1, 30, (6,), generator=generator)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if head == "ForImageClassification":
            row = {"pixel_values": torch.rand(1, 4, 4, generator=generator), "labels": torch.tensor(number % 2)}
        elif head == "ForSequenceClassification":
            row["labels"] = torch.tensor(number % 2)
        elif head == "ForQuestionAnswering":
            row |= {"start_positions": torch.tensor(number), "end_positions": torch.tensor(number + 1)}
        elif head == "ForTokenClassification":
            row["labels"] = ids % 2
        else:
            row["labels"] = ids
        made.append(row)
    return made


HEADS = (
    *("ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification", "ForMaskedLM"),
    "ForImageClassification",
)
IMAGES = {"image_size": 4, "patch_size": 2, "num_channels": 1}


@pytest.mark.parametrize("head", HEADS)
def test_one_step(head, tmp_path):
    weights = []
    for batch in (4, 1):
        torch.manual_seed(0)
        images = head == "ForImageClassification"
        classes = family("xf_vision_transformer" if images else "xf_bert")
        model = classes[head](classes[head].config_class(**SIZES, **(IMAGES if images else {})))
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=4 // batch,
            max_steps=1,
            learning_rate=1.0,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows(head)).train()
        weights.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    for name, whole in weights[0].items():
        torch.testing.assert_close(
            weights[1][name], whole, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
