"""Swaps from every kind of source: the report, reloading, caches, states of constant size, equality, refusals."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.conversion import (
    convert_checkpoint,
    from_transformers,
    swap_checkpoint,
    swap_components,
    to_transformers,
)
from tests.conversion.architectures import FIRST, VOCAB, architectures, tiny

ARCHITECTURES = architectures()
SINKS = {"type": "sliding_window", "window_size": 6, "sinks": 2}
PERFORMER = {"type": "performer", "num_features": 16}
CONSTANT = {
    "sliding_window": SINKS,
    "linear_transformer": "linear_transformer",
    "performer": PERFORMER,
    "delta_net": "delta_net",
    "hedgehog": "hedgehog",
    "lolcats": {"type": "lolcats", "window": 6},
}
LONG = {
    "longformer": {"type": "longformer", "attention_window": 4},
    "bigbird": {"type": "bigbird", "block_size": 2},
    "nystromformer": {"type": "nystromformer", "num_landmarks": 4},
}
SCALED = {"rope_theta": 500.0, "rope_type": "linear", "factor": 3.0}
# (source, fields of its config, mechanism)
DECODERS = [
    *(("llama", {}, name) for name in CONSTANT),
    ("qwen3", {}, "delta_net"),
    ("qwen2", {"rope_parameters": SCALED}, "performer"),
    ("gemma3_text", {}, "linear_transformer"),
    ("gemma2", {}, "sliding_window"),
    ("gpt_neo", {}, "linear_transformer"),
    ("opt", {"word_embed_proj_dim": 12}, "hedgehog"),
]


def make(name: str, **changes):
    case = ARCHITECTURES[name]
    head = next(h for h, ours in case.heads.items() if ours in ("ForCausalLM", "ForSeq2SeqLM", "ForMaskedLM"))
    return case.make(head, **changes), case.given(head)


def swapped(source, **changes):
    """The result and its report, which tells every tensor once."""
    if from_transformers(source).config.is_heterogeneous and "layers" not in changes:
        changes["layers"] = {"attention": "all"}
    model, report = swap_components(source, **changes)
    told = [*report.kept, *(name for _, name, _ in report.derived), *report.new]
    assert len(told) == len(set(told))
    assert set(told) <= set(model.state_dict())
    pointers = {tensor.data_ptr() for name, tensor in model.state_dict().items() if name in told}
    assert all(name in told or tensor.data_ptr() in pointers for name, tensor in model.state_dict().items())
    assert report.movement.kl_mean >= 0 and report.movement.predictions
    return model, report


def logits(model, given) -> Tensor:
    with torch.no_grad():
        return model(**given).logits


def check_equal(model, source, given, mask="attention_mask") -> None:
    """The logits of real tokens."""
    real = given[mask].bool()
    expected = logits(source, given)[real]
    torch.testing.assert_close(logits(model, given)[real], expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def check_reload(model, given, folder) -> None:
    model.save_pretrained(folder)
    base = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        before, after = model.model(**given)[0], base(**given)[0]
    torch.testing.assert_close(after, before, atol=1e-6 * float(before.abs().max()), rtol=0)


def state_size(past) -> int:
    """Numbers that a cache holds."""

    def count(held) -> int:
        if isinstance(held, Tensor):
            return held.numel()
        entries = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else ()
        return sum(map(count, entries))

    return sum(count(vars(layer)) for layer in past.layers)


@torch.no_grad()
def check_decoding(model, constant: bool = True) -> None:
    """40 tokens one by one as all at once, and the state after them as large as after 20."""
    ids = torch.randint(FIRST, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    whole, past, steps, sizes = model(ids).logits, None, [], []
    for place in range(ids.shape[1]):
        output = model(ids[:, place : place + 1], past_key_values=past, use_cache=True)
        past = output.past_key_values
        steps.append(output.logits)
        sizes.append(state_size(past))
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5 * float(whole.abs().max()), rtol=0)
    assert not constant or sizes[20] == sizes[-1]


def check_generation(model, **prompt) -> None:
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    with_cache, without = (model.generate(**prompt, use_cache=cached, **options) for cached in (True, False))
    assert torch.equal(with_cache, without)


# ---------------------------------------------------------------------------------------------------- decoders


@pytest.mark.parametrize("name, fields, mechanism", DECODERS, ids=[f"{n}-{m}" for n, _, m in DECODERS])
def test_decoders(name, fields, mechanism, tmp_path):
    source, given = make(name, **({"max_position_embeddings": 64} | fields))
    model, report = swapped(source, attention=CONSTANT[mechanism])
    assert not report.dropped
    old, new = (config.layer(0).attention for config in (from_transformers(source).config, model.config))
    assert (new.query_key_norm, new.angles, new.score_cap) == (old.query_key_norm, old.angles, old.score_cap)
    check_reload(model, given, tmp_path)
    check_decoding(model)
    check_generation(model, input_ids=given["input_ids"][:1])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt_neox", "gptj"])
def test_a_wide_window_equals_the_decoder(name):
    source, given = make(name)
    wide = {"type": "sliding_window", "window_size": 16, "sinks": 2}
    model, report = swapped(source, attention=wide)
    check_equal(model, source, given)
    assert not report.new and not report.dropped and not report.derived


def test_mistral_keeps_its_window():
    """Sinks beside the window that the source has: equal as long as the text is inside it."""
    source, given = make("mistral", sliding_window=16)
    window = from_transformers(source).config.attention.window_size
    model, report = swapped(source, attention={"type": "sliding_window", "window_size": window, "sinks": 4})
    check_equal(model, source, given)
    assert not report.new and not report.dropped
    check_decoding(model)


def test_a_bias_of_distances_stays_in_windows():
    """BLOOM's ALiBi."""
    source, given = make("bloom")
    model, report = swapped(source, attention={"type": "band_attention", "window_size": 16})
    check_equal(model, source, given)
    assert not report.new and not report.dropped
    check_decoding(swapped(source, attention={"type": "band_attention", "window_size": 5})[0])


# ---------------------------------------------------------------------------------------------------- encoders


@pytest.mark.parametrize("mechanism", LONG)
@pytest.mark.parametrize("layers", ["all", "global"])
def test_modernbert(mechanism, layers, tmp_path):
    source, given = make("modernbert")
    ours = from_transformers(source).config
    numbers = [n for n in range(ours.num_hidden_layers) if ours.layer(n).attention.angles == "global"]
    assert 0 < len(numbers) < ours.num_hidden_layers
    chosen = {"attention": "all" if layers == "all" else numbers}
    model, report = swapped(source, attention=LONG[mechanism], layers=chosen)
    for index in range(ours.num_hidden_layers):
        old, new = ours.layer(index).attention, model.config.layer(index).attention
        assert new.angles == old.angles  # each layer turns by its own rate
        assert new == old if layers == "global" and index not in numbers else new.type == mechanism
    assert not report.dropped
    check_reload(model, given, tmp_path)


# ---------------------------------------------------------------------------------------------------- two towers


def test_t5_as_longt5(tmp_path):
    """A band in the encoder, with its relative bias; the decoder as it is, or with a window of its own."""
    source, given = make("mt5")
    band = {"type": "band_attention", "window_size": 16}
    model, report = swapped(source, attention=band, decoder={"attention": "dense"})
    check_equal(model, source, given, mask="decoder_attention_mask")
    assert not report.new and not report.dropped and not report.derived
    both, _ = swapped(source, attention={**band, "window_size": 3}, decoder={"attention": {**band, "window_size": 4}})
    check_reload(both, given, tmp_path)
    prompt = {name: given[name][:1] for name in ("input_ids", "attention_mask")}
    check_generation(both, **prompt)


@pytest.mark.parametrize("name, mechanism", [("mbart", "performer"), ("mbart", "sliding_window"), ("led", "hedgehog")])
def test_bart_and_led(name, mechanism, tmp_path):
    source, given = make(name)
    model, _ = swapped(source, attention=CONSTANT[mechanism])
    assert model.config.tower("decoder").attention.type == mechanism
    check_reload(model, given, tmp_path)
    check_generation(model, **{key: given[key][:1] for key in ("input_ids", "attention_mask")})


# ---------------------------------------------------------------------------------------------------- settings


def test_distances_end_where_they_did():
    """DeBERTa's table without buckets is as long as its longest text: of longer ones the last row counts."""
    source, given = make("deberta")
    model, report = swapped(source, max_length=53)
    check_equal(model, source, given)
    assert not report.new and not report.dropped and not report.derived


def test_tables_of_every_layer_are_tiled():
    sizes = dict(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    source = XFormerForMaskedLM(XFormerConfig(**sizes, max_position_embeddings=8, position="per_layer_position"))
    model, report = swap_components(source, max_length=20, measure=False)
    tables = [each.model.trunk.position.tables for each in (source, model)]
    for old, new in zip(*tables, strict=True):
        assert torch.equal(new.weight, old.weight.repeat(3, 1)[:20])
    assert not report.new and not report.dropped


def test_what_has_no_meaning_there_is_left_behind_with_a_note():
    source, _ = make("gpt_neo")  # scores that are not scaled
    for name in ("linear_transformer", "delta_net"):
        model, report = swapped(source, attention=name)
        assert model.config.attention.scale is None
        assert report.notes == [f"attention '{name}' does not take over scale=1.0"]
    model, report = swapped(source, attention=PERFORMER)
    assert model.config.attention.scale == 1.0 and not report.notes


def test_capped_scores():
    source, _ = make("gemma2")
    with pytest.raises(ValueError, match="attention 'performer' has no place for `score_cap` .* set it to None"):
        swap_components(source, attention=PERFORMER, layers={"attention": "all"})
    model, _ = swapped(source, attention={**PERFORMER, "score_cap": None})
    assert model.config.layer(0).attention.score_cap is None


def test_frequencies_by_length():
    """A state that holds turned keys cannot turn them anew, a cache of keys can; nothing stops an encoder."""
    rope = {"rope_theta": 500.0, "rope_type": "dynamic", "factor": 2.0}
    source, _ = make("llama", rope_parameters=rope)
    for attention in ("linear_transformer", "delta_net", "hedgehog", "performer", SINKS):
        name = attention if isinstance(attention, str) else attention["type"]
        turned = f"'rotary' as it is set turns all keys anew .* attention '{name}' as it is set generates from keys"
        with pytest.raises(ValueError, match=turned):
            swap_components(source, attention=attention, measure=False)
    check_decoding(swapped(source, attention="hedgehog", position={"scaling": None})[0])
    swapped(source, attention={"type": "sliding_window", "sinks": 0})
    late = {"type": "rotary", "local_theta": 10.0, "scaling": {"type": "dynamic", "factor": 2.0}}
    sizes = dict(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    XFormerConfig(**sizes, position=late, attention="performer")
    XFormerConfig(**sizes, position=late, attention={"type": "performer", "angles": "local"}, is_decoder=True)
    with pytest.raises(ValueError, match="turns all keys anew"):
        XFormerConfig(**sizes, position=late, attention="performer", is_decoder=True)


# ---------------------------------------------------------------------------------------------------- refusals


def test_order_is_not_lost_in_silence():
    source, given = make("xlnet")
    with pytest.raises(ValueError, match="stack 'two_stream' has queries at chosen places.*or `stack='plain'`"):
        swap_components(source, attention="bigbird", measure=False)
    swapped = {"attention": "bigbird", "stack": "plain", "measure": False}
    with pytest.raises(ValueError, match="'transformer_xl' is all that tells this model the order .*'rotary'"):
        swap_components(source, **swapped)
    model, _ = swap_components(source, **swapped, position="rotary")
    assert model.config.position.type == "rotary" and logits(model, given).isfinite().all()
    swap_components(source, **swapped, position="none")  # said, not forgotten
    swap_components(source, **swapped, layers={"attention": "1"})


def test_what_needs_its_own_attention():
    source, _ = make("funnel")
    with pytest.raises(ValueError, match="funnel's pooled queries need an attention that takes positions of its own"):
        swap_components(source, attention="performer")
    source, _ = make("bloom")
    with pytest.raises(
        ValueError, match="'alibi' adds a bias .* 'sliding_window' has no place .* or 'band_attention'"
    ):
        swap_components(source, attention=SINKS)


@pytest.mark.parametrize("name", ["OPTForSequenceClassification", "OPTForQuestionAnswering"])
def test_classifiers_of_narrow_states(name):
    source = ARCHITECTURES["opt"].make(name, word_embed_proj_dim=12)
    with pytest.raises(ValueError, match="word_embed_proj_dim=12 below hidden_size=32 .*convert the bare model"):
        from_transformers(source)
    assert swap_components(source, head="Model", attention=PERFORMER, measure=False)[0] is not None


@pytest.mark.parametrize("name", [None, "longformer"])
def test_a_long_roberta_goes_back_as_a_longformer(name, tmp_path):
    """It came from RoBERTa, and is what transformers' Longformer is: to 0.0 within the window, from a folder and from
    memory."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    config = transformers.RobertaConfig(vocab_size=60, max_position_embeddings=34, type_vocab_size=1, **sizes)
    model = transformers.RobertaForMaskedLM(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    change = {"attention": {"type": "longformer", "attention_window": 32}, "max_length": 64, "measure": False}
    swap_checkpoint(tmp_path / "theirs", tmp_path / "ours", **change)
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", model_type=name)
    backs = [transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back")]
    if name is not None:
        backs.append(to_transformers(swap_components(model, **change)[0], model_type=name))
    ids = torch.randint(5, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
        for back in backs:
            assert type(back) is transformers.LongformerForMaskedLM and back.config.max_position_embeddings == 66
            torch.testing.assert_close(back.eval()(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_family_that_is_asked_for_says_what_it_lacks(tmp_path):
    tiny("BertForMaskedLM").make().save_pretrained(tmp_path / "theirs")
    swap_checkpoint(tmp_path / "theirs", tmp_path / "ours", attention="longformer", measure=False)
    with pytest.raises(ValueError, match="position='learned_absolute'.* every 'longformer' model"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "back", model_type="longformer")
    with pytest.raises(ValueError, match="came from 'xf_bert' and has attention 'longformer'"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "back")
