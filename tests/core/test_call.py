"""The state bundle: packed rows, derived views, and what a tower puts into it."""

import copy
import dataclasses

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerModel
from hf_xformers.blocks.base import flattened, unflattened
from hf_xformers.core.cache import make_cache
from hf_xformers.core.call import (
    Call,
    SublayerOutput,
    add_losses,
    segments_from_positions,
    self_attention_cache,
)
from hf_xformers.core.prepared import Prepared, State, one_state
from hf_xformers.feedforward.base import FeedForward
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

SMALL = dict(vocab_size=40, hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=16)


def test_segments():
    rows = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2], [0, 0, 0, 1, 0]])
    assert segments_from_positions(rows).tolist() == [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 2, 2, 3]]
    assert segments_from_positions(rows[:1]) is None
    assert segments_from_positions(rows[:1] + 7) is None
    assert segments_from_positions(torch.zeros(2, 1, dtype=torch.long)) is None


def test_sums_of_losses():
    total = {"balance": torch.tensor(1.0)}
    add_losses(total, {"balance": torch.tensor(2.0), "ponder": torch.tensor(5.0)})
    add_losses(total, None)
    assert {name: float(loss) for name, loss in total.items()} == {"balance": 3.0, "ponder": 5.0}


def context(**fields):
    index = torch.arange(4)
    given = dict(padding_mask=None, positions=index[None], query_index=index, key_index=index, causal=True, fresh=True)
    return Call(**{**given, **fields})


class Table(Prepared):
    rows: int


class Bias(State):
    matrix: torch.Tensor | None = None
    line: torch.Tensor | None = None


class Scores(State):
    given: torch.Tensor


def test_prepared():
    whole = context()
    assert whole.find(Table) is None
    with pytest.raises(LookupError, match="`Table` in the slot 'far' into this call"):
        whole.prepared(Table, "far")
    made = whole.prepare(Table, lambda: Table(3))
    assert whole.prepare(Table, lambda: Table(4)) is made is whole.prepared(Table), "made once"
    whole.keep(Table(5), "far")
    assert (whole.prepared(Table, "far").rows, whole.prepared(Table).rows) == (5, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.rows = 4


def test_states_as_tensors():
    """Tensors in the order of states and fields, and back; what is None is left out."""
    one, two, three = torch.randn(3, 2).unbind()
    states = {**one_state(Scores(one), "a"), **one_state(Bias(line=two)), **one_state(Scores(three), "b")}
    names, tensors = flattened(states)
    assert all(x is y for x, y in zip(tensors, (one, two, three), strict=True))
    back = unflattened(names, tensors)
    assert list(back) == list(states) and back[Bias, None].matrix is None
    assert back[Bias, None].line is two and back[Scores, "b"].given is three
    assert flattened({}) == ({}, []) and unflattened({}, []) == {}


def test_views():
    whole = context()
    whole.keep(Table(1))
    whole.start(Bias(torch.zeros(1)))
    inside = whole.passing(one_state(Scores(torch.ones(1)), 3))
    assert inside.state(Bias) is None is inside.state(Scores) and inside.state(Scores, 3).given.item() == 1
    assert list(whole.states) == [(Bias, None)]
    assert inside.find(Table) is whole.prepared(Table), "what is made once is seen by all layers"
    part = whole.derive(positions=torch.zeros(1, 2, dtype=torch.long))
    assert part.made == {} and part.states == {} and part.causal and part.positions.shape == (1, 2)
    assert whole.derive(Table).made == whole.made != {} and whole.positions.shape == (1, 4)
    plain = context()
    assert plain.passing({}) is plain, "nothing differs, so nothing is copied"
    assert whole.passing({}).states == {} and list(whole.states) == [(Bias, None)]
    seen = copy.copy(whole)
    seen.padding_mask = torch.ones(1, 4).bool()
    assert whole.padding_mask is None and seen.made is whole.made and seen.states is whole.states
    assert {**vars(seen), "padding_mask": None} == vars(whole)


class Writer(FeedForward):
    def forward(self, hidden_states, seen):
        return SublayerOutput(hidden_states, states=one_state(Scores(2 * hidden_states)))


class Reader(FeedForward):
    def forward(self, hidden_states, seen):
        return SublayerOutput(seen.given(Scores).given + hidden_states)


@pytest.mark.parametrize("given", [{}, one_state(Bias(torch.ones(1)))])
def test_a_sublayer_hands_on_to_the_next_one(given):
    """What a sublayer hands on reaches the sublayers behind it and the next layer, and no other call."""
    config = XFormerConfig(**SMALL, block="macaron").layer(0)
    layer = config.block.build(config, layer_idx=0).eval()
    layer.feedforward, layer.feedforward_2 = Writer(), Reader()
    states, call = torch.randn(1, 4, 16), context()
    layer.prepare(call, None)
    output = layer(states, None, given, context=call, step=0)
    assert list(output.states) == [*given, (Scores, None)] and call.states == {}


def test_padding_of_the_queries():
    mask = torch.tensor([[0, 1, 1, 1, 0]]).bool()
    assert context().query_padding_mask is None
    assert context(padding_mask=mask).query_padding_mask is mask
    later = context(padding_mask=mask, fresh=False, query_index=torch.tensor([3, 4]))
    assert later.query_padding_mask.tolist() == [[True, False]]


def test_the_writing_part_of_a_cache():
    plain = DynamicCache()
    assert self_attention_cache(plain) is plain and self_attention_cache(None) is None
    assert self_attention_cache(EncoderDecoderCache(plain, DynamicCache())) is plain


def seen_context(model, **inputs):
    """The context that a tower's first layer gets."""
    seen = []
    layer = model.base_model.layers[0] if hasattr(model.base_model, "layers") else model.model.trunk.layers[0]
    handle = layer.register_forward_pre_hook(lambda *args: seen.append(args[2]["context"]), with_kwargs=True)
    model(**inputs)
    handle.remove()
    return seen[0]


def test_what_a_tower_says():
    torch.manual_seed(0)
    model = XFormerForCausalLM(XFormerConfig(**SMALL)).eval()
    ids = tokens(2, 5, high=40)
    plain = seen_context(model, input_ids=ids)
    assert plain.causal and plain.fresh and not plain.static and plain.padding_mask is None
    assert plain.positions.tolist() == [[0, 1, 2, 3, 4]] and plain.query_index.tolist() == [0, 1, 2, 3, 4]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    padded = seen_context(model, input_ids=ids, attention_mask=mask)
    assert padded.padding_mask.dtype == torch.bool and torch.equal(padded.padding_mask, mask.bool())
    assert padded.positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]
    cache = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
    longer = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1)
    later = seen_context(model, input_ids=ids[:, :2], attention_mask=longer, past_key_values=cache)
    assert not later.fresh and later.query_index.tolist() == [5, 6] and later.key_index.tolist() == list(range(7))
    assert later.positions.tolist() == [[3, 4], [4, 5]]
    packed = seen_context(model, input_ids=ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]]), use_cache=False)
    assert packed.segment_ids.tolist() == [[0, 0, 1, 1, 1]] * 2
    said = seen_context(
        model, input_ids=ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]]), attention_mask=torch.ones(2, 5)
    )
    assert said.segment_ids is None, "with a mask, positions are only positions"


def test_one_or_two_towers():
    torch.manual_seed(0)
    model, ids = XFormerModel(XFormerConfig(**SMALL)).eval(), tokens(1, 3, high=40)
    for name in ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"):
        with pytest.raises(ValueError, match=f"`{name}` was given to a model without a second tower"):
            model(ids, **{name: ids})
    types = torch.ones_like(ids)
    assert torch.equal(model(ids, token_type_ids=types)[0], model(ids)[0]), "there is no table of types"
    with pytest.raises(ValueError, match="exactly one of"):
        model()
    with pytest.raises(ValueError, match="needs `decoder_input_ids` as well"):
        XFormerModel(XFormerConfig(**SMALL, is_encoder_decoder=True))(inputs_embeds=torch.zeros(1, 2, 16))


@pytest.mark.parametrize("both", [False, True])
def test_towers_are_set(both):
    """What is taken out can be put back, as adapters and wrappers do; and BERT's name for leaving a pooler out."""
    torch.manual_seed(0)
    model = XFormerModel(XFormerConfig(**SMALL, is_encoder_decoder=both, add_pooler=True), add_pooling_layer=False)
    ids, encoder, decoder = tokens(1, 3, high=40), model.get_encoder(), model.get_decoder()
    expected = model.eval()(ids)[0]
    model.set_encoder(encoder)
    model.set_decoder(decoder)
    assert model.get_encoder() is encoder and model.get_decoder() is decoder and model.pooler is None
    assert torch.equal(model(ids)[0], expected)


def test_shifted_inputs():
    """A decoder that is given nothing reads the input (or the labels) one step late."""
    config = XFormerConfig(**SMALL, is_encoder_decoder=True, pad_token_id=3, decoder_start_token_id=2)
    torch.manual_seed(0)
    model = XFormerModel(config).eval()
    ids = torch.tensor([[10, 11, 12], [20, -100, -100]])
    assert model.shift_right(ids).tolist() == [[2, 10, 11], [2, 20, 3]]
    ids, given = tokens(2, 4, high=40), {"use_cache": False}
    shifted = torch.cat([torch.full((2, 1), 2), ids[:, :-1]], 1)
    expected = model(ids, decoder_input_ids=shifted, **given).last_hidden_state
    close(model(ids, **given).last_hidden_state, expected, 1e-6)
    padded = torch.cat([torch.full((2, 2), 3), ids], 1)  # on the left: the start moves with the text
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    close(model(padded, attention_mask=mask, **given).last_hidden_state[:, 2:], expected, 1e-5)
    apart, mask = ids[:, [0, 0, 0, 1, 2, 3]], torch.tensor([[1, 0, 0, 1, 1, 1]] * 2)  # padding between tokens
    close(model(apart, attention_mask=mask, **given).last_hidden_state[mask == 1].view_as(expected), expected, 1e-5)
    config = XFormerConfig(**SMALL, is_encoder_decoder=True, pad_token_id=None)
    with pytest.raises(ValueError, match="Set `decoder_start_token_id`"):
        XFormerModel(config)(ids)


def test_encoder_outputs_can_be_given():
    torch.manual_seed(0)
    model, ids = XFormerModel(XFormerConfig(**SMALL, is_encoder_decoder=True)).eval(), tokens(2, 4, high=40)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    expected = model(ids, attention_mask=mask, decoder_input_ids=ids).last_hidden_state
    memory = model.get_encoder()(input_ids=ids, attention_mask=mask)
    for given in (memory, (memory.last_hidden_state,), BaseModelOutputWithPooling(memory.last_hidden_state)):
        output = model(encoder_outputs=given, attention_mask=mask, decoder_input_ids=ids).last_hidden_state
        close(output, expected, 1e-6)


def test_positions_of_an_encoder_decoder():
    """`position_ids` are the encoder's; a row of several documents would be read by one decoder."""
    torch.manual_seed(0)
    config = XFormerConfig(**SMALL, is_encoder_decoder=True, position="learned_absolute", max_position_embeddings=9)
    model, ids = XFormerModel(config).eval(), tokens(2, 4, high=40)
    places = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    memory = model.get_encoder()(input_ids=ids, position_ids=places)
    expected = model(encoder_outputs=memory, decoder_input_ids=ids).last_hidden_state
    given = model(ids, position_ids=places, decoder_input_ids=ids)
    assert (memory.last_hidden_state - model.get_encoder()(input_ids=ids).last_hidden_state).abs().max() > 1e-3
    close(given.encoder_last_hidden_state, memory.last_hidden_state, 1e-6)
    close(given.last_hidden_state, expected, 1e-6)
    packed = torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(ValueError, match="the decoder of an encoder-decoder reads the whole row"):
        model(ids, position_ids=packed, decoder_input_ids=ids)
    model(ids, position_ids=packed, attention_mask=torch.ones_like(ids), decoder_input_ids=ids)


def test_token_types():
    torch.manual_seed(0)
    model, ids = XFormerModel(XFormerConfig(**SMALL, type_vocab_size=2)).eval(), tokens(2, 4, high=40)
    default = model(ids).last_hidden_state
    close(model(ids, token_type_ids=torch.zeros_like(ids)).last_hidden_state, default, 1e-6)
    assert (model(ids, token_type_ids=torch.ones_like(ids)).last_hidden_state - default).abs().max() > 1e-3


def test_one_token_type(caplog):
    """A model of one type, such as RoBERTa, is given the types that a tokenizer of BERT's kind makes for a pair."""
    model, ids = XFormerModel(XFormerConfig(**SMALL, type_vocab_size=1)).eval(), tokens(1, 4, high=40)
    expected, types = model(ids).last_hidden_state, torch.tensor([[0, 0, 1, 1]])
    assert torch.equal(model(ids, token_type_ids=types).last_hidden_state, expected)
    assert "this model has `type_vocab_size=1` and cannot tell a second text from the first" in caplog.text


PACKED = {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}


def test_packed_rows_and_caches():
    """A cache continues one text: none is made for a packed row, and none is read by it."""
    torch.manual_seed(0)
    model = XFormerForCausalLM(XFormerConfig(**SMALL)).eval()
    ids = tokens(2, 5, high=40)
    for training in (False, True):
        model.train(training)
        assert seen_context(model, input_ids=ids, **PACKED).segment_ids.tolist() == [[0, 0, 1, 1, 1]] * 2
        assert model(input_ids=ids, **PACKED).past_key_values is None
    for past in (0, 3):
        cache = make_cache(model.config)
        if past:
            model(input_ids=ids[:, :past], past_key_values=cache)
        with pytest.raises(ValueError, match="a cache continues one text per row; leave `past_key_values` out"):
            model(input_ids=ids, past_key_values=cache, **PACKED)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"block": "cpe"}, "block 'cpe'"),
        ({"block": "r_transformer"}, "block 'r_transformer'"),
        ({"stack": "feedback", "attention": "feedback"}, "stack 'feedback'"),
        ({"attention": "linear_transformer"}, "attention 'linear_transformer'"),
        ({"per_layer_config": {0: {"attention": "performer"}}}, "attention 'performer'"),
    ],
)
def test_packed_rows_are_refused(fields, part):
    torch.manual_seed(0)
    config = XFormerConfig(**SMALL, **fields, is_decoder=True)
    model, ids = XFormerForCausalLM(config), tokens(2, 5, high=40)
    for use_cache in (None, True, False):
        with pytest.raises(ValueError, match=f"packed documents.*{part} cannot keep apart; give one document per row"):
            model(input_ids=ids, use_cache=use_cache, **PACKED)


def test_packed_rows_are_refused_in_a_graph():
    model, ids = (
        XFormerForCausalLM(XFormerConfig(**SMALL, attention="performer", is_decoder=True)),
        tokens(2, 5, high=40),
    )
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(input_ids=ids, position_ids=torch.arange(5).expand(2, -1), use_cache=False)
    with pytest.raises(RuntimeError, match="packed documents.*attention 'performer' cannot keep apart"):
        compiled(input_ids=ids, use_cache=False, **PACKED)


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ("encoder", {"stack": "universal"}),
        ("encoder", {"block": "macaron"}),
        ("encoder", {"stack": "patience_exit"}),
        ("decoder", {"stack": "universal", "block": "sandwich", "num_hidden_layers": 2}),
        ("decoder", {"stack": "reversible", "residual": "pre_ln", "attention": "band_attention"}),
        ("decoder", {"stack": "compressive", "attention": "transformer_xl", "position": "none"}),
        ("decoder", {"attention": "adaptive_span", "position": "none"}),
        ("decoder", {"attention": "talking_heads", "position": "rotary"}),
    ],
)
def test_packed_rows_are_kept_apart(shape, fields):
    """What supports packed rows gives each document what it gives alone, whichever way a collator says where they
    are."""
    torch.manual_seed(0)
    model_class = XFormerForCausalLM if shape == "decoder" else XFormerForMaskedLM
    config = XFormerConfig(**{**SMALL, **NO_DROPOUT, **fields, "is_decoder": shape == "decoder"})
    model = make_strong(model_class(config).double().eval())
    parts = [tokens(1, length, seed=length, high=40) for length in (3, 1, 4)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=part).logits for part in parts], 1)
        for said in ({"position_ids": positions}, {"cu_seq_lens_q": torch.tensor([0, 3, 4, 8], dtype=torch.int32)}):
            close(model(input_ids=torch.cat(parts, 1), **said).logits, expected)


def test_its_former_name_says_the_new_one():
    from hf_xformers import extend

    with pytest.warns(FutureWarning, match="write `Call`"):
        assert extend.LayerContext is Call


def test_nobody_copies_a_call():
    """torch's FSDP copies dataclasses among a layer's arguments, and accelerate moves them: by `to` alone, here."""
    from torch.distributed.utils import _apply_to_tensors

    call = context()
    call.keep(Table(3))
    names, _ = flattened({**one_state(Bias(torch.ones(2)))})
    assert _apply_to_tensors(torch.Tensor.half, call) is call
    assert _apply_to_tensors(torch.Tensor.half, {"names": names}) == {"names": names}
