"""The page of inference techniques says what families declare, and names tests that there are."""

from __future__ import annotations

import pytest
import torch

from hf_xformers.variants import config_class, family, model_types
from scripts.docs import techniques
from scripts.docs.markup import ROOT
from tests.helpers import tiny_fields


def test_every_test_is_there():
    for technique in techniques.TECHNIQUES:
        for path in technique.tests:
            file, _, name = path.partition("::")
            assert (ROOT / file).is_file(), path
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") or not name, path


def test_every_family_has_a_row():
    text = techniques.techniques()
    rows = text.partition("## Family by family")[2]
    for model_type in model_types():
        assert f"zoo/{model_type.removeprefix('xf_')}.md)" in rows
    for technique in techniques.TECHNIQUES:
        assert f"| {technique.name} |" in text


@pytest.mark.parametrize("name", ["bert", "longformer", "universal_transformer", "funnel_transformer", "cpe"])
def test_padding_removal_is_what_configs_take(name):
    """Said yes where a model with the switch is built, no where it is refused."""
    kind = config_class(f"xf_{name}")
    fields = tiny_fields(kind, unpad_inputs=True)
    if techniques.families()[name].no_unpadding:
        with pytest.raises(ValueError, match="leave `unpad_inputs` out"):
            kind(**fields)
    else:
        kind(**fields)


@pytest.mark.parametrize("name", ["gpt2", "linear_transformer", "longformer", "lite_transformer"])
def test_decoding_is_what_models_do(name):
    """Against generation itself: a state that cannot roll back refuses an assistant, and one without pages refuses
    continuous batching."""
    can, kind = techniques.families()[name], config_class(f"xf_{name}")
    model = family(f"xf_{name}")["ForCausalLM"](kind(**tiny_fields(kind, is_decoder=True))).eval()
    ids = torch.arange(5, 11)[None]

    def speculate():
        return model.generate(ids, max_new_tokens=3, do_sample=False, prompt_lookup_num_tokens=2)

    if can.rolls_back:
        speculate()
    else:
        with pytest.raises(ValueError, match="cannot check drafted tokens, .* leave `assistant_model`"):
            speculate()
    if can.no_pages:
        with pytest.raises(ValueError, match="Continuous batching keeps keys and values"):
            model.init_continuous_batching()
