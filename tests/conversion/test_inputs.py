"""`position_ids`, `inputs_embeds` and labels of a converted model mean what they mean in transformers."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import TrainingArguments

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from hf_xformers.conversion import from_transformers, swap_components
from hf_xformers.training.trainer import XFormerTrainer
from tests.conversion.architectures import FIRST, LENGTH, architectures, tiny

SCALED = {"scale_embedding": True}
ENTRIES = {name: entry for name, entry in architectures().items() if "image_size" not in entry.tiny}


def read(model, **given):
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.arange(FIRST, FIRST + 4)[None]
    with torch.no_grad():
        out = model(**given)
    return (out.last_hidden_state if hasattr(out, "last_hidden_state") else out.logits)[0]


def assert_same_meaning(model, length=LENGTH):
    ours = from_transformers(model)
    torch.manual_seed(0)
    vectors = torch.randn(1, length, model.get_input_embeddings().embedding_dim)
    torch.testing.assert_close(
        read(ours, inputs_embeds=vectors), read(model, inputs_embeds=vectors), atol=1e-4, rtol=1e-4
    )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return
    ids = torch.arange(FIRST, FIRST + length)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for places in (torch.arange(2, 2 + length), torch.arange(4, 4 + length)):
        given["position_ids"] = places[None]
        torch.testing.assert_close(read(ours, **given), read(model, **given), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ENTRIES)
def test_vectors_and_places(name):
    entry = ENTRIES[name]
    scaled = SCALED if "scale_embedding" in entry.config().to_dict() else {}
    length = 12 if name == "reformer" else LENGTH  # whole chunks, as transformers cannot pad given positions
    assert_same_meaning(entry.make(next(iter(entry.heads)), **scaled), length)


@pytest.mark.parametrize("case", [tiny("BartModel", scale_embedding=True), tiny("RobertaModel")], ids=str)
def test_what_the_table_gives_is_what_may_be_given(case):
    """Vectors that a client looks up in `get_input_embeddings()`, as for soft prompts, are those of the ids."""
    ours = from_transformers(case.make())
    ids = torch.arange(FIRST, FIRST + LENGTH)[None]
    found = read(ours, inputs_embeds=ours.get_input_embeddings()(ids))
    torch.testing.assert_close(found, read(ours, input_ids=ids))
    ours.resize_token_embeddings(ours.config.vocab_size + 3)
    torch.testing.assert_close(read(ours, inputs_embeds=ours.get_input_embeddings()(ids)), found)


def test_labels_of_a_decoder_by_itself(tmp_path):
    """transformers' BartForCausalLM compares them in place; data of this package's trainer has them like ids."""
    model = tiny("BartForCausalLM").make()
    ours = from_transformers(model)
    ids = torch.arange(FIRST, FIRST + 2 * LENGTH).view(2, LENGTH)
    labels = ids.roll(1, 0).masked_fill(ids % 5 == 0, -100)
    mask = torch.ones_like(ids)
    found = ours(input_ids=ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(found, model(input_ids=ids, attention_mask=mask, labels=labels).loss)
    ours.config.labels_in_place = False
    shifted = ours(input_ids=ids, attention_mask=mask, labels=labels).loss
    ours.config.labels_in_place = True
    trainer = XFormerTrainer(ours, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    batch = trainer._prepare_inputs({"input_ids": ids, "attention_mask": mask, "labels": labels})
    torch.testing.assert_close(ours.eval()(**batch).loss, shifted)


def test_rows_of_data_count_places_from_0(tmp_path):
    ours = from_transformers(tiny("RobertaForMaskedLM").make())
    ids = torch.arange(FIRST, FIRST + LENGTH)[None]
    trainer = XFormerTrainer(ours, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    batch = trainer._prepare_inputs({"input_ids": ids, "position_ids": torch.arange(LENGTH)[None]})
    torch.testing.assert_close(read(ours, **batch), read(ours, input_ids=ids))


TINY = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


@pytest.mark.parametrize("embedding", ["token", "adaptive", "fix_norm", "word_characters"])
def test_scale_of_vectors(embedding):
    """Ids are read times sqrt(D); vectors as they are, but where they are changed before they are scaled."""
    spec = {"type": embedding, "scale": True, **({"cutoffs": (20,)} if embedding == "adaptive" else {})}
    head = {"type": "adaptive", "cutoffs": (20,)} if embedding == "adaptive" else "linear"
    config = XFormerConfig(**TINY, embedding=spec, head=head, position="none", hidden_dropout_prob=0.0)
    torch.manual_seed(0)
    model = XFormerModel(config).eval()
    ids = torch.arange(10, 30)[None]
    table = model.get_input_embeddings()
    torch.testing.assert_close(read(model, inputs_embeds=table(ids)), read(model, input_ids=ids))
    layer, captured = model.trunk.layers[0], []
    handle = layer.register_forward_pre_hook(lambda _, given: captured.append(given[0]))
    read(model, input_ids=ids)
    handle.remove()
    if embedding == "token":
        torch.testing.assert_close(captured[0], table.weight[ids] * 4)
    if embedding == "fix_norm":
        torch.testing.assert_close(captured[0].norm(dim=-1), torch.full((1, 20), 4.0))


@pytest.mark.parametrize("kind", ["lora", "trainable_tokens"])
def test_adapters_of_a_scaled_table(kind):
    """What an adapter adds to the table is scaled as the table is."""
    peft = pytest.importorskip("peft")
    lora = kind == "lora"
    settings = (
        peft.LoraConfig(target_modules=["tokens"], init_lora_weights=False)
        if lora
        else peft.TrainableTokensConfig(target_modules=["tokens"], token_indices=[FIRST, FIRST + 3])
    )
    ours = XFormerModel(XFormerConfig(**TINY, embedding={"type": "token", "scale": True}))
    adapted = peft.get_peft_model(ours, settings).eval()
    for name, tensor in adapted.named_parameters():
        if "trainable_tokens_delta" in name:
            torch.nn.init.normal_(tensor)
    ids = torch.arange(FIRST, FIRST + LENGTH)[None]
    before = read(adapted, input_ids=ids)
    torch.testing.assert_close(read(adapted.merge_and_unload(), input_ids=ids), before, atol=1e-4, rtol=1e-4)


def test_places_stay_when_components_are_swapped():
    """A position that counts tokens by itself still is given RoBERTa's numbers."""
    ours = from_transformers(tiny("RobertaModel").make())
    swapped, _ = swap_components(ours, position="sinusoidal_absolute", measure=False)
    ids = torch.arange(FIRST, FIRST + LENGTH)[None]
    places = torch.arange(2, 2 + LENGTH)[None]
    torch.testing.assert_close(read(swapped, input_ids=ids, position_ids=places), read(swapped, input_ids=ids))


def test_generation_counts_from_the_first_position():
    """`generate` makes positions of its own, and a text padded on the left goes on as without padding."""
    torch.manual_seed(0)
    model = XFormerForCausalLM(XFormerConfig(**TINY, first_position=2, initializer_range=0.5)).eval()
    ids = torch.arange(10, 15)[None]
    told = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": -1}
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, model(input_ids=expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(ids, **told), expected)
    padded = torch.cat([torch.zeros_like(ids[:, :2]), ids], 1)
    found = model.generate(padded, attention_mask=(padded != 0).long(), **told)
    assert torch.equal(found[:, 2:], expected)
