"""Keyword arguments that nothing reads are refused by name; what transformers and its neighbours pass is not."""

from __future__ import annotations

import pytest
import torch

from hf_xformers.variants import config_class, family
from tests.helpers import tiny_fields

IDS = torch.tensor([[5, 6, 7, 8]])


def tiny(model_type, head="Model", **fields):
    torch.manual_seed(0)
    config = config_class(model_type)(**tiny_fields(config_class(model_type), **fields))
    return family(model_type)[head](config).eval()


@pytest.mark.parametrize(
    ("model_type", "head", "name", "nearest"),
    [
        ("xf_bert", "ForMaskedLM", "global_attention_mask", "attention_mask"),
        ("xf_bert", "Model", "atention_mask", "attention_mask"),
        ("xf_bert", "ForSequenceClassification", "token_types_ids", "token_type_ids"),
        ("xf_gpt2", "ForCausalLM", "output_atentions", "output_attentions"),
        ("xf_t5", "ForSeq2SeqLM", "decoder_inputs_ids", "decoder_input_ids"),
        ("xf_longformer", "ForMaskedLM", "global_atention_mask", "global_attention_mask"),
    ],
)
def test_typos_and_inputs_of_other_models(model_type, head, name, nearest):
    model = tiny(model_type, head)
    with pytest.raises(
        TypeError,
        match=f"No component of this '{model_type}' model reads the argument `{name}`; did you mean `{nearest}`",
    ):
        model(input_ids=IDS, **{name: torch.ones_like(IDS)})
    model(input_ids=IDS, **{name: None})  # None is what an argument is that was not given


def test_far_names_list_what_there_is():
    with pytest.raises(TypeError, match=r"`xyz`; it takes attention_mask, .*, use_cache\."):
        tiny("xf_bert")(input_ids=IDS, xyz=1)


def test_what_a_component_reads():
    mask = torch.tensor([[1, 0, 0, 0]])
    model = tiny("xf_longformer", "ForMaskedLM")
    with torch.no_grad():
        assert model(input_ids=IDS, global_attention_mask=mask).logits.isfinite().all()


@pytest.mark.parametrize("model_type", ["xf_bert", "xf_gpt2", "xf_t5", "xf_longformer"])
def test_common_arguments_pass(model_type):
    """Flags, Trainer's count and a collator's packed lengths."""
    classes = family(model_type)
    config = config_class(model_type)(**tiny_fields(config_class(model_type)))
    model = classes["Model"](config).eval()
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    extra = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 4, "max_length_k": 4}
    with torch.no_grad():
        model(
            input_ids=IDS, return_dict=True, output_hidden_states=True, num_items_in_batch=4, use_cache=False, **extra
        )
    with pytest.raises(TypeError, match="`attention_maskk`; did you mean `attention_mask`"):
        model(input_ids=IDS, attention_maskk=IDS)


@pytest.mark.parametrize("head", ["Model", "ForCausalLM", "ForSeq2SeqLM"])
def test_a_text_without_tokens(head):
    model = tiny("xf_performer", head, is_encoder_decoder=head == "ForSeq2SeqLM", is_decoder=head == "ForCausalLM")
    with pytest.raises(ValueError, match=r"has no tokens \(a batch of 2 rows of length 0\); give at least one"):
        model(input_ids=IDS.new_zeros(2, 0), **({"labels": IDS.expand(2, 4)} if head == "ForSeq2SeqLM" else {}))
    if head == "ForCausalLM":
        with pytest.raises(ValueError, match="has no tokens"):
            model.generate(IDS.new_zeros(1, 0), max_new_tokens=2)


@pytest.mark.parametrize("given", ["argument", "config"])
def test_a_decoder_does_not_read_both_ways_on_demand(given, tmp_path):
    model = tiny("xf_gpt2", is_decoder=True)
    model.save_pretrained(tmp_path)
    more = {"is_causal": False} if given == "argument" else {}
    if given == "config":
        model.config.is_causal = False
    with pytest.raises(ValueError, match="`is_causal=False` was given to a decoder, .* with `is_decoder=False`"):
        model(IDS, **more)
    both = type(model).from_pretrained(tmp_path, is_decoder=False)
    with torch.no_grad():
        first, alone = (both(ids).last_hidden_state[0, 0] for ids in (IDS, IDS[:, :1]))
    assert (first - alone).abs().max() > 1e-4, "the first token sees those after it"
    tiny("xf_bert")(IDS, is_causal=False)
