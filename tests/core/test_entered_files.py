"""How many files of the package one inference call goes through: what a reader has to open to follow it."""

import sys
from pathlib import Path

import accelerate.state  # noqa: F401  # with it, calls ask Accelerate whether it divides texts
import pytest
import torch

import hf_xformers
from hf_xformers.variants import config_class, family
from tests.helpers import tiny_fields

ROOT = f"{Path(hf_xformers.__file__).parent}/"
MOST = {  # upper bounds, to be lowered with what is reached
    ("xf_bert", "ForMaskedLM"): 23,
    ("xf_longformer", "ForMaskedLM"): 33,
    ("xf_performer", "ForCausalLM"): 37,
    ("xf_reformer", "ForCausalLM"): 36,
    ("xf_t5", "ForSeq2SeqLM"): 32,
}


@torch.no_grad()
def entered(model, inputs) -> set[str]:
    """The files whose functions the second call of a model enters: what is made once is made by the first."""
    found: set[str] = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.add(frame.f_code.co_filename.removeprefix(ROOT))

    model(**inputs)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        model(**inputs)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize(("model_type", "head"), MOST)
def test_a_call_goes_through_few_files(model_type, head):
    kind = config_class(model_type)
    model = family(model_type)[head](kind(**tiny_fields(kind))).eval()
    ids = torch.randint(5, model.config.vocab_size, (2, 24))
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(24) < torch.tensor([[24], [18]])).long()}
    files = entered(model, inputs | ({"decoder_input_ids": ids} if head == "ForSeq2SeqLM" else {}))
    assert len(files) <= MOST[model_type, head], sorted(files)
