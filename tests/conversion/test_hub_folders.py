"""Folders as the Hub has them: old names, buffers and heads beside the model, no `architectures`, another head."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_xformers.conversion import convert_checkpoint, from_transformers, swap_checkpoint, to_transformers
from hf_xformers.conversion.activations import activation_name
from hf_xformers.conversion.lookup import converter_for
from tests.conversion.architectures import FIRST, architectures, tiny

ALL = architectures()
LANGUAGE = ("ForCausalLM", "ForMaskedLM")
LABELLED = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
PAIRS = [
    (name, source, heads[0])
    for name, entry in ALL.items()
    for source in [next((theirs for theirs, ours in entry.heads.items() if ours in LANGUAGE), None)]
    for heads in [[head for head in LABELLED if head in entry.heads.values()]]
    if source
    and heads
    # whose language model has another direction, or another number of towers
    and name not in ("reformer", "bart", "mbart", "marian", "pegasus", "bigbird_pegasus")
]
IDS = torch.arange(FIRST, FIRST + 9)[None]


def edit(folder, remove=(), **fields):
    path = folder / "config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**said, **fields}.items() if key not in remove}))


def weights(folder, add=None, remove=()):
    path = folder / "model.safetensors"
    found = {key: tensor for key, tensor in load_file(path).items() if key not in remove}
    save_file({**found, **(add or {})}, path, {"format": "pt"})


def states(model):
    with torch.no_grad():
        return model(IDS).last_hidden_state


@pytest.mark.parametrize(("name", "source", "head"), PAIRS)
def test_new_labels_on_a_language_model(name, source, head, tmp_path):
    """From a folder as from a loaded model: the model is kept, the labels start anew."""
    model = ALL[name].make(source)
    model.save_pretrained(tmp_path)
    ours = from_transformers(tmp_path, head)
    kept = from_transformers(model, head)
    assert type(ours) is type(kept)
    expected, found = kept.model.state_dict(), ours.model.state_dict()
    same = [key for key in found if not key.startswith("pooler.")]
    assert same and all(torch.equal(found[key], expected[key]) for key in same)


def test_hidden_layer_before_new_labels(tmp_path):
    """ModernBERT's is that of its language model."""
    model = ALL["modernbert"].make("ModernBertForMaskedLM")
    model.save_pretrained(tmp_path)
    ours = from_transformers(tmp_path, "ForTokenClassification")
    assert torch.equal(ours.transform.dense.weight, model.head.dense.weight)
    assert torch.equal(ours.transform.norm.weight, model.head.norm.weight)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_deberta_as_published(name, tmp_path):
    """The language model's head under its first name, the generator's beside it, and no `architectures`."""
    config = transformers.AutoConfig.for_model(
        name,
        **dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48),
        **dict(relative_attention=True, pos_att_type="p2c|c2p", position_biased_input=False, type_vocab_size=0),
        **(dict(position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True) if "v2" in name else {}),
        legacy=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    edit(tmp_path / "theirs", remove=("architectures", "legacy"))
    extra = {"mask_predictions.dense.weight": torch.ones(32, 32), "mask_predictions.classifier.bias": torch.ones(1)}
    extra |= {"deberta.embeddings.position_embeddings.weight": torch.ones(512, 32)}
    weights(tmp_path / "theirs", add=extra if "v2" in name else {})
    expected = states(model.base_model)
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert report.target == "XFDebertaModel" and "lm_predictions.lm_head.bias" in report.dropped
    torch.testing.assert_close(states(transformers.AutoModel.from_pretrained(tmp_path / "ours")), expected)
    for head in ("Model", "ForSequenceClassification", "ForTokenClassification"):
        ours = from_transformers(tmp_path / "theirs", head)
        torch.testing.assert_close(states(ours if head == "Model" else ours.model), expected)
    with torch.no_grad():
        found = from_transformers(tmp_path / "theirs", "ForMaskedLM")(IDS).logits
        torch.testing.assert_close(found, model(IDS).logits)
    swap_checkpoint(tmp_path / "theirs", tmp_path / "new", residual="pre_ln", measure=False)
    weights(tmp_path / "theirs", add={"strange.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="no place for: 'strange.weight'"):
        from_transformers(tmp_path / "theirs")


def test_masks_of_early_releases(tmp_path):
    """GPT-Neo's files hold the masks of its attention."""
    model = ALL["gpt_neo"].make("GPTNeoForCausalLM")
    model.save_pretrained(tmp_path)
    names = [f"transformer.h.{index}.attn.attention" for index in range(3)]
    masks = {f"{name}.bias": torch.ones(1, 1, 24, 24).tril().bool() for name in names}
    weights(tmp_path, add=masks | {f"{name}.masked_bias": torch.tensor(-1e9) for name in names})
    with torch.no_grad():
        torch.testing.assert_close(from_transformers(tmp_path)(IDS).logits, model(IDS).logits)


UNTIED = {
    **dict.fromkeys(("LlamaForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel"), "lm_head.weight"),
    "BertForMaskedLM": "cls.predictions.decoder.weight",
}


@pytest.mark.parametrize("name", UNTIED)
def test_output_that_is_missing(name, tmp_path):
    """An untied model without its projection predicts nothing; on the way back as well."""
    model = tiny(name, tie_word_embeddings=False).make()
    model.save_pretrained(tmp_path / "theirs")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    output = UNTIED[name]
    weights(tmp_path / "theirs", remove=(output,))
    weights(tmp_path / "ours", remove=("lm_head.decoder.weight",))
    with pytest.raises(ValueError, match=f"lacks '{output}', what {type(model).__name__} predicts tokens with"):
        from_transformers(tmp_path / "theirs")
    with pytest.raises(ValueError, match="lacks 'lm_head.decoder.weight'"):
        to_transformers(tmp_path / "ours")
    from_transformers(tmp_path / "theirs", "Model")
    edit(tmp_path / "theirs", tie_word_embeddings=True)
    assert from_transformers(tmp_path / "theirs").config.tie_word_embeddings


@pytest.mark.parametrize(("exact", "parts"), [(False, 2), (True, 1), (True, 2)])
def test_divided_sums_of_bloom(exact, parts):
    """transformers leaves two biases of each layer out of sums that it divides."""
    model = ALL["bloom"].make("BloomForCausalLM", pretraining_tp=parts, slow_but_exact=exact)
    if exact and parts > 1:
        with pytest.raises(ValueError, match="set slow_but_exact to False"):
            from_transformers(model)
        return
    with torch.no_grad():
        torch.testing.assert_close(from_transformers(model)(IDS).logits, model(IDS).logits)


ACTIVATIONS = ("hidden_act", "hidden_activation", "activation", "activation_function")
TABLED = [
    (name, field)
    for name, config in ((name, entry.config()) for name, entry in ALL.items() if entry.ours == "xformer")
    for field in ACTIVATIONS
    if hasattr(config, field) and name != "gpt_oss"  # which reads none
]


@pytest.mark.parametrize(("name", "field"), TABLED)
def test_an_activation_that_converts_converts_back(name, field):
    for value in ("relu", "gelu", "gelu_new", "quick_gelu", "silu", "relu2", "sigmoid", "linear"):
        converter = converter_for(ALL[name].model_type)
        theirs = ALL[name].config(**{field: value})  # Gemma's changes what old files say
        try:
            ours = converter.config_to_ours(theirs)
        except ValueError:
            continue
        back = getattr(converter.config_to_theirs(ours), field)
        assert activation_name(back) == activation_name(getattr(theirs, field))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("modernbert", {"layer_types": ["full_attention"] * 4, "local_attention": 8}, None),
        ("modernbert", {"local_attention": 7}, "local_attention=7"),
        ("eurobert", {"classifier_pooling": "first"}, "classifier_pooling='first' does not convert; these do: 'bos'"),
    ],
)
def test_fields_that_some_models_do_not_read(name, changes, message):
    model = ALL[name].make(next(iter(ALL[name].heads)), **changes)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            from_transformers(model)
        return
    torch.testing.assert_close(states(from_transformers(model)), states(model))


FORERUNNERS = {"phi3": "LlamaForCausalLM"}  # of those that a forerunner can say


@pytest.mark.parametrize("name", [name for name, entry in ALL.items() if entry.ours == "xformer"])
def test_back_without_a_name(name, tmp_path):
    """A converted model knows where it came from; of one that does not, a forerunner of its family is made."""
    entry = ALL[name]
    head = entry.generating() or next(iter(entry.heads))
    ours = from_transformers(entry.make(head))
    assert type(to_transformers(ours)).__name__ == entry.back_as.get(head, head)
    ours.save_pretrained(tmp_path)
    back = to_transformers(tmp_path)
    assert type(back).__name__ == FORERUNNERS.get(name, entry.back_as.get(head, head))
    if name in FORERUNNERS:
        torch.testing.assert_close(back(IDS).logits, ours(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", ["rope_yarn", "rope_llama3", "biases"])
def test_a_llama_without_a_name(changes, tmp_path):
    """Whose config other families can say as well, or fail over its rotation."""
    theirs = ALL["llama"].make("LlamaForCausalLM", **ALL["llama"].variations[changes])
    from_transformers(theirs).save_pretrained(tmp_path)
    back = to_transformers(tmp_path)
    assert type(back) is type(theirs)
    torch.testing.assert_close(back.state_dict(), theirs.state_dict(), rtol=0, atol=0)
