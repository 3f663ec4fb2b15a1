"""RoFormer, DeBERTa and decoders by themselves: what the general parity tests do not reach."""

from __future__ import annotations

import pytest
import torch
import transformers

import hf_xformers
from hf_xformers.conversion import convert_checkpoint, from_transformers, swap_components, to_transformers
from tests.conversion.architectures import tiny
from tests.conversion.test_architectures import assert_same, outputs

LEGACY = "DebertaV2ForMaskedLM"
TOLERANCE = 1e-5


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits


def gap(one, other, given):
    mask = given["attention_mask"].bool()
    return float((logits(one, given)[mask] - logits(other, given)[mask]).abs().max())


# ---------------------------------------------------------------------------------------------------- deberta


@pytest.mark.parametrize("tie", [True, False])
def test_masked_lm_of_the_third_version(tie):
    """`legacy=False` multiplies by the token table itself, whatever the config says of tying; it comes back in the
    other layout, with the same outputs."""
    case = tiny(LEGACY)
    model = case.make(legacy=False, tie_word_embeddings=tie)
    ours = from_transformers(model)
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    given = case.given("left")
    assert_same(case.entry, model, ours, case.labelled(given))
    back = to_transformers(ours)
    assert back.legacy and gap(back, model, given) < TOLERANCE
    head = model.lm_predictions.lm_head
    assert torch.equal(back.cls.predictions.decoder.bias, head.bias) and bool(head.bias.any())


def test_absolute_positions_beside_relative_ones():
    case = tiny(LEGACY)
    model = case.make(position_biased_input=True)
    ours = from_transformers(model)
    assert [part.type for part in ours.config.position.parts] == ["learned_absolute", "deberta"]
    given = case.given()
    assert_same(case.entry, model, ours, given)
    back = to_transformers(ours)
    assert back.config.position_biased_input and gap(back, model, given) == 0


def test_long_texts():
    """Buckets beyond the exact distances, and distances beyond the last bucket."""
    case = tiny(LEGACY)
    model = case.make()
    ours = from_transformers(model)
    ids = torch.randint(5, 60, (1, 24), generator=torch.Generator().manual_seed(3))
    assert gap(model, ours, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}) < TOLERANCE


# ---------------------------------------------------------------------------------------------------- roformer


def test_a_trained_position_table_is_refused():
    model = tiny("RoFormerModel").make()
    with torch.no_grad():
        model.encoder.embed_positions.weight[3] += 1.0
    with pytest.raises(
        ValueError, match=r"'encoder\.embed_positions\.weight' cannot be converted: it is not the table"
    ):
        from_transformers(model)


def test_a_computed_table_may_have_been_saved_in_half_precision():
    """Sinusoids that are only rounded convert; those that were trained a little would be lost."""
    config = transformers.DistilBertConfig(
        vocab_size=60, dim=32, n_layers=1, n_heads=2, hidden_dim=8, sinusoidal_pos_embds=True
    )
    model = transformers.DistilBertModel(config)
    from_transformers(model)
    from_transformers(model.bfloat16())
    from_transformers(model.float())
    table = model.embeddings.position_embeddings.weight
    table.data += 1e-3 * torch.randn_like(table)
    with pytest.raises(ValueError, match="it is not the table of sinusoids"):
        from_transformers(model)


def test_multiple_choice_reads_the_last_token():
    ours = from_transformers(tiny("RoFormerForMultipleChoice").make())
    assert ours.config.classifier_pooling == "last" and ours.model.pooler is None
    ours.config.classifier_pooling = "first"
    with pytest.raises(ValueError, match="classifier_pooling='first' has no counterpart: RoFormerForMultipleChoice"):
        to_transformers(ours)
    other = from_transformers(tiny("RoFormerForSequenceClassification").make())
    assert other.config.add_pooler and other.config.pooler_activation == "gelu"


def test_rotated_values_need_dense_attention():
    model = tiny("RoFormerModel", rotary_value=True).make()
    with pytest.raises(ValueError, match="rotary with `values`"):
        swap_components(model, attention="longformer")


# ---------------------------------------------------------------------------------------------------- decoders


@pytest.mark.parametrize("name", ["BertLMHeadModel", "RobertaForCausalLM", "RoFormerForCausalLM"])
def test_both_sides_or_earlier_tokens(name):
    """A class for causal modelling whose config is bidirectional, and the reverse, compute what ours does not."""
    entry = tiny(name).entry
    with pytest.raises(ValueError, match=f"{name} with is_decoder=False does not convert"):
        from_transformers(getattr(transformers, name)(entry.config()))
    masked = name.replace("LMHeadModel", "ForMaskedLM").replace("CausalLM", "MaskedLM")
    with pytest.raises(ValueError, match=f"{masked} with is_decoder=True does not convert"):
        from_transformers(getattr(transformers, masked)(entry.config(is_decoder=True)))


def test_a_decoder_of_two_towers_by_itself():
    """Cross-attention that nothing can use is dropped, and starts anew on the way back; the rest comes back exactly.
    transformers does not shift the labels of this class."""
    case = tiny("BartForCausalLM")
    model = case.make(encoder_layers=3)
    ours = from_transformers(model)
    assert ours.config.num_hidden_layers == 1 and ours.config.is_decoder and ours.model.decoder is None
    given = case.given()
    labels = case.labelled(given)["labels"]
    with torch.no_grad():
        expected, loss = model(**given, labels=labels).loss, ours(**given, shift_labels=labels).loss
    torch.testing.assert_close(loss, expected)
    back = to_transformers(ours)
    assert type(back) is transformers.BartForCausalLM
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before if "encoder_attn" not in key)
    whole = tiny("BartForConditionalGeneration").make()
    with pytest.raises(ValueError, match="'ForCausalLM', which has one tower; load the checkpoint as BartForCausalLM"):
        from_transformers(whole, head="ForCausalLM")
    with pytest.raises(ValueError, match="'ForSeq2SeqLM', which has two towers"):
        from_transformers(model, head="ForSeq2SeqLM")


# ---------------------------------------------------------------------------------------------------- swaps


def test_kernels_have_no_place_for_the_terms_of_deberta():
    with pytest.raises(ValueError, match="deberta"):
        swap_components(tiny(LEGACY).make(), attention="performer", measure=False)


def test_linear_attention_keeps_the_rotation():
    case = tiny("RoFormerForMaskedLM")
    source, given = case.make(), case.given()
    model, report = swap_components(source, attention="linear_transformer", measure=False)
    assert model.config.position.to_dict()["layout"] == "interleaved" and not report.new
    rotated = logits(model, given)
    model.model.trunk.position.rotation = lambda *_, **__: None
    assert float((logits(model, given) - rotated).abs().max()) > 1e-3
    assert rotated.isfinite().all() and gap(model, source, given) > 1e-3


# ---------------------------------------------------------------------------------------------------- folders


def test_head_of_a_published_checkpoint(tmp_path):
    """The published third version holds its masked LM head in the new layout, and its config does not say so."""
    model = tiny(LEGACY).make(legacy=False)
    model.config.legacy = True
    model.save_pretrained(tmp_path / "theirs")
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", head="ForMaskedLM")
    assert not report.new and not report.dropped
    model.config.legacy = False
    ours = hf_xformers.XFDebertaForMaskedLM.from_pretrained(tmp_path / "ours")
    assert gap(ours, model, tiny(LEGACY).given()) < TOLERANCE
    assert outputs(ours, tiny(LEGACY).given())
