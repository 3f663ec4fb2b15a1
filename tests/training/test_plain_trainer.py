"""transformers' own Trainer gets the losses that this package's does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from hf_xformers.variants import config_class, family
from tests.helpers import tiny_fields

VOCAB = 40


def made(name, head="ForCausalLM", **changes):
    torch.manual_seed(0)
    fields = tiny_fields(config_class(name), "decoder" if head == "ForCausalLM" else "encoder")
    fields |= {"vocab_size": VOCAB, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **changes}
    return family(name)[head](config_class(name)(**fields)).double()


def trainer_of(model, folder, **options):
    settings = {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return Trainer(model=model, args=TrainingArguments(**settings, **options))


@pytest.mark.parametrize("name", ["xf_gpt2", "xf_linear_transformer"])
@pytest.mark.parametrize("adapted", [False, True])
def test_label_smoothing_shifts_labels(name, adapted, tmp_path):
    model = made(name)
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2))
    model.eval()
    ids = torch.randint(3, VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))
    trainer = trainer_of(model, tmp_path, label_smoothing_factor=0.1)
    with torch.no_grad():
        smoothed = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
        logits = model(ids).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(smoothed, expected, rtol=1e-5, atol=1e-5)
