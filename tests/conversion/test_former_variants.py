"""Models that were converted before they had a family of their own are free mixes: they load, and they still lead to
transformers."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

import hf_xformers
from hf_xformers import XFormerConfig
from hf_xformers.conversion import from_transformers, to_transformers
from tests.conversion.architectures import architectures

ALL = architectures()


def as_free_mix(ours, head, **changes):
    """The free mix with the components and the tensors of `ours`."""
    fields = {**ours.config.to_dict(), **changes}
    for name in ("model_type", "architectures", "transformers_version"):
        fields.pop(name, None)
    known = set(XFormerConfig.__dataclass_fields__)
    return getattr(hf_xformers, f"XFormer{head}")(
        XFormerConfig(**{name: value for name, value in fields.items() if name in known})
    ).eval()


@pytest.mark.parametrize("model_type", ["albert", "electra"])
@torch.no_grad()
def test_masked_language_models(model_type, tmp_path):
    entry = ALL[model_type]
    head = next(name for name, ours in entry.heads.items() if ours == "ForMaskedLM")
    theirs = entry.make(head)
    ours = from_transformers(theirs)
    former = as_free_mix(ours, "ForMaskedLM", classifier_transform="none")
    former.load_state_dict(ours.state_dict())
    given = entry.given(head)
    expected = theirs(**given).logits
    former.save_pretrained(tmp_path / "former")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "former")
    assert type(loaded).__name__ == "XFormerForMaskedLM"
    real = given["attention_mask"].bool()
    torch.testing.assert_close(loaded(**given).logits[real], expected[real], atol=1e-5, rtol=1e-5)
    for source in (loaded, tmp_path / "former"):
        back = to_transformers(source, model_type=model_type)
        assert type(back) is type(theirs)
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, back.state_dict()[name]), name


@torch.no_grad()
def test_electra_with_a_pooler(tmp_path):
    """What is the classifier's hidden layer now was its pooler."""
    entry, head = ALL["electra"], "ElectraForSequenceClassification"
    theirs = entry.make(head)
    ours = from_transformers(theirs)
    assert ours.config.classifier_transform == "dense" and not ours.config.add_pooler
    former = as_free_mix(ours, "ForSequenceClassification", classifier_transform="none", add_pooler=True)
    tensors = ours.state_dict()
    renamed = {name.replace("transform.dense.", "model.pooler.dense."): tensor for name, tensor in tensors.items()}
    former.load_state_dict(renamed)
    former.save_pretrained(tmp_path / "former")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "former")
    given = entry.given(head)
    torch.testing.assert_close(loaded(**given).logits, theirs(**given).logits, atol=1e-5, rtol=1e-5)
    for source in (loaded, tmp_path / "former"):
        back = to_transformers(source, model_type="electra")
        assert type(back) is type(theirs)
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, back.state_dict()[name]), name
