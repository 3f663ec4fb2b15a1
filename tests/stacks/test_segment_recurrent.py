"""Segment recurrence: segments with memory against one dense pass with the mask that they amount to."""

import io

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM, XFormerForSeq2SeqLM
from hf_xformers.core.cache import make_cache
from hf_xformers.core.segment_memory import SegmentMemory
from hf_xformers.variants.transformer_xl import XFTransformerXLConfig, XFTransformerXLForCausalLM
from tests.attention.references.softmax import four_terms
from tests.attention.score_helpers import HEADS, WIDTH, softmax_by_rows, split_heads
from tests.helpers import close, make_strong, pad, tokens

LAYERS = 2


def build(memory_length=4, cls=XFTransformerXLForCausalLM, attention=None, **fields):
    config = XFTransformerXLConfig(
        **{
            "vocab_size": 99,
            "hidden_size": WIDTH,
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "intermediate_size": 8,
            "pad_token_id": 0,
            "attention": {"type": "transformer_xl", **(attention or {})},
            "stack": {"type": "segment_recurrent", "memory_length": memory_length},
            **fields,
        }
    )
    torch.manual_seed(0)
    return make_strong(cls(config).double().eval(), amount=0.3)


def in_segments(model, ids, lengths, memory=None, masks=None):
    """Logits of consecutive segments, and the last memory."""
    found, begin = [], 0
    for index, length in enumerate(lengths):
        mask = None if masks is None else masks[index]
        output = model(ids[:, begin : begin + length], attention_mask=mask, segment_memory=memory, use_cache=False)
        memory, begin = output.segment_memory, begin + length
        found.append(output.logits)
    return torch.cat(found, dim=1), memory


def dense_pass(model, ids, allowed):
    """One pass over the whole text, layer by layer from the equations, under the mask `allowed` [T, T]."""
    tower = model.model.trunk
    length = ids.shape[1]
    states = tower.embedding.tokens.weight[ids] * WIDTH**0.5
    biases = tower.layers[0].attention.content_bias, tower.layers[0].attention.position_bias
    for layer in tower.layers:
        attention = layer.attention
        entered = layer.attention_residual.enter(states)
        weights = softmax_by_rows(four_terms(attention, entered, length, biases), allowed)
        mixed = weights @ split_heads(attention.v_proj(entered), WIDTH // HEADS)
        states = layer.attention_residual.leave(states, attention.o_proj(mixed.transpose(1, 2).flatten(2)))
        entered = layer.feedforward_residual.enter(states)
        inner = torch.relu(layer.feedforward.up_proj(entered))
        states = layer.feedforward_residual.leave(states, layer.feedforward.down_proj(inner))
    states = states if tower.final_norm is None else tower.final_norm(states)
    return model.lm_head(states)


def segment_mask(lengths, memory_length):
    """start(segment of i) - M <= j <= i."""
    starts = torch.repeat_interleave(torch.tensor(lengths).cumsum(0) - torch.tensor(lengths), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    return (place[None] <= place[:, None]) & (place[None] >= starts[:, None] - memory_length)


@pytest.mark.parametrize("memory_length", [0, 2, 5, 40])
@pytest.mark.parametrize("residual", ["post_ln", "pre_ln"])
def test_equals_a_dense_pass(memory_length, residual):
    model, ids, lengths = build(memory_length, residual=residual), tokens(2, 12), (3, 4, 1, 4)
    with torch.no_grad():
        output, memory = in_segments(model, ids, lengths)
        close(output, dense_pass(model, ids, segment_mask(lengths, memory_length)), 1e-10)
        if memory_length == 40:
            close(output, model(ids).logits, 1e-10)
    assert memory.length == min(memory_length, 12) and len(memory.states) == LAYERS


def test_window_of_the_same_reach():
    """With a memory as long as the reach, segments of any length equal one pass with a sliding window, and token by
    token."""
    model, ids = build(3, attention={"reach": 3}), tokens(2, 14)
    place = torch.arange(14)
    distance = place[:, None] - place[None]
    with torch.no_grad():
        expected = dense_pass(model, ids, (distance >= 0) & (distance <= 3))
        close(model(ids).logits, expected, 1e-10)
        for lengths in ((5, 5, 4), (1,) * 14, (2, 11, 1)):
            close(in_segments(model, ids, lengths)[0], expected, 1e-10)
        cache = make_cache(model.config)
        steps = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(14)]
        close(torch.cat(steps, 1), expected, 1e-10)
        assert cache.layers[0].stored == 3 and cache.get_seq_length() == 14
        texts = [
            model.generate(ids[:, :6], max_new_tokens=8, do_sample=False, use_cache=use_cache)
            for use_cache in (True, False)
        ]
        assert torch.equal(*texts)


def test_gradient_stops_at_the_memory():
    """None reaches the earlier segment, but the memory's keys and values teach the projections."""
    model, ids = build(4), tokens(2, 9)
    vectors = model.get_input_embeddings()(ids).detach()
    first = vectors[:, :5].clone().requires_grad_()
    memory = model(inputs_embeds=first).segment_memory
    assert not any(state.requires_grad for state in memory.states)
    output = model(inputs_embeds=vectors[:, 5:], segment_memory=memory).logits
    assert torch.autograd.grad(output.sum(), first, allow_unused=True) == (None,)
    projection = model.model.trunk.layers[0].attention.k_proj.weight
    (slope,) = torch.autograd.grad(
        model(inputs_embeds=vectors[:, 5:], segment_memory=memory).logits[:, 0].sum(), projection
    )
    (alone,) = torch.autograd.grad(model(inputs_embeds=vectors[:, 5:]).logits[:, 0].sum(), projection)
    assert (slope - alone).abs().max() > 1e-6


def test_rows_reset_independently():
    model, ids = build(4), tokens(3, 10)
    with torch.no_grad():
        memory = model(ids[:, :5]).segment_memory
        kept, fresh = model(ids[:, 5:], segment_memory=memory), model(ids[:, 5:])
        reset = model(ids[:, 5:], segment_memory=memory.reset(torch.tensor([False, True, False])))
        close(reset.logits[1], fresh.logits[1], 1e-12)
        close(reset.logits[[0, 2]], kept.logits[[0, 2]], 1e-12)
        assert (kept.logits[1] - fresh.logits[1]).abs().max() > 1e-6
        later = tokens(3, 3, seed=7)
        again = model(later, segment_memory=reset.segment_memory).logits
        alone, _ = in_segments(model, torch.cat([ids[1:2, 5:], later[1:2]], 1), (5, 3))
        close(again[1:2], alone[:, 5:], 1e-12)
        every = model(ids[:, 5:], segment_memory=memory.reset()).logits
        close(every, fresh.logits, 1e-12)
        all_rows = model(ids[:, 5:], segment_memory=memory.reset(torch.ones(3, dtype=torch.bool))).logits
        close(all_rows, fresh.logits, 1e-12)
    with pytest.raises(ValueError, match=r"boolean tensor \[3\]"):
        memory.reset(torch.tensor([1]))
    assert SegmentMemory().reset(torch.tensor([True])).states == ()


@torch.no_grad()
def check_rows_of_any_length(model):
    """Rows of different lengths in every segment, one of them empty, give what each gives alone, and so does what
    follows."""
    lengths = [(5, 3, 6, 4), (2, 6, 1, 5), (6, 0, 4, 1)]
    rows = [tokens(sum(entry), seed=index) for index, entry in enumerate(lengths)]
    for side in ("left", "right"):
        memory, begin, found = None, [0, 0, 0], [[], [], []]
        for segment in range(4):
            pieces = [row[at : at + entry[segment]] for row, at, entry in zip(rows, begin, lengths)]
            ids, mask = pad(pieces, 6, side, seed=9)
            output = model(ids, attention_mask=mask, segment_memory=memory, use_cache=False)
            memory = output.segment_memory
            for index in range(3):
                found[index].append(output.logits[index][mask[index].bool()])
                begin[index] += lengths[index][segment]
        assert memory.mask is None or memory.mask[:, -1].all()
        later = tokens(3, 5, seed=11)
        after = model(later, segment_memory=memory, use_cache=False).logits
        for index, (row, pieces, entry) in enumerate(zip(rows, found, lengths)):
            expected, last = in_segments(model, row[None], [length for length in entry if length])
            close(torch.cat(pieces)[None], expected, 1e-10)
            alone = model(later[index : index + 1], segment_memory=last, use_cache=False).logits
            close(after[index : index + 1], alone, 1e-10)


def test_padding_never_enters():
    check_rows_of_any_length(build(4))


def test_generation_after_a_memory():
    model = build(24)
    ids, prompts = tokens(2, 9), tokens(2, 5, seed=4)
    memory = model(ids).segment_memory
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for beams in (1, 3):
        cached, full = (
            model.generate(prompts, segment_memory=memory, use_cache=use_cache, num_beams=beams, **settings)
            for use_cache in (True, False)
        )
        whole = model.generate(torch.cat([ids, prompts], 1), num_beams=beams, **settings)
        assert torch.equal(cached, full) and torch.equal(cached[:, 5:], whole[:, 14:])
    padded, mask = pad([prompts[0], prompts[1, :3]], 5, "left", seed=3)
    mixed = model.generate(padded, attention_mask=mask, segment_memory=memory, **settings)
    alone = model.generate(prompts[1:, :3], segment_memory=memory.reorder(torch.tensor([1])), **settings)
    assert torch.equal(mixed[1:, 5:], alone[:, 3:])
    assert model(prompts, past_key_values=make_cache(model.config), use_cache=True).segment_memory is not None
    with pytest.raises(ValueError, match="cannot check drafted tokens"):
        model.generate(prompts, assistant_model=model, **settings)


@pytest.mark.parametrize("attention", ["transformer_xl", "adaptive_span"])
@torch.no_grad()
def test_a_prompt_in_pieces_after_a_memory(attention):
    """Padding on the left of a prompt that is read in pieces never stands between the memory and the text."""
    kind = {"type": attention, "max_span": 24, "ramp": 4} if attention == "adaptive_span" else {}
    model = build(24, attention=kind, **({"position": "none"} if kind else {}))
    read = [tokens(8, seed=1), tokens(3, seed=2)]
    ids, mask = pad(read, 8, "right")
    memory = model(ids, attention_mask=mask).segment_memory
    ids, mask = pad([tokens(9, seed=3), tokens(4, seed=4)], 9, "left", seed=5)
    for row in range(2):
        alone, _ = in_segments(model, torch.cat([read[row], ids[row][mask[row].bool()]])[None], [len(read[row]), 9])
        for pieces in ((9,), (3, 1, 2, 3), (1,) * 9):
            cache, found, begin = make_cache(model.config), [], 0
            for length in pieces:
                seen, given = begin + length, {} if begin else {"segment_memory": memory}
                piece = {"input_ids": ids[:, begin:seen], "attention_mask": mask[:, :seen]}
                output = model(**piece, **given, past_key_values=cache, use_cache=True)
                found.append(output.logits)
                begin = seen
            close(torch.cat(found, dim=1)[row][mask[row].bool()], alone[0, len(read[row]) :], 1e-10)


def test_memory_object():
    memory = build(4)(tokens(2, 6)).segment_memory
    assert memory.length == 4 and memory.batch_size == 2 and SegmentMemory().length == 0
    swapped = memory.reorder(torch.tensor([1, 0]))
    close(swapped.states[0][0], memory.states[0][1], 0)
    assert memory.repeat_interleave(3).states[1].shape[0] == 6
    half = memory.reset(torch.tensor([True, False])).to(torch.float32)
    assert half.states[0].dtype == torch.float32 and half.mask.dtype == torch.bool
    buffer = io.BytesIO()
    torch.save(half.state_dict(), buffer)
    buffer.seek(0)
    again = SegmentMemory.from_state_dict(torch.load(buffer))
    assert torch.equal(again.mask, half.mask) and torch.equal(again.states[1], half.states[1])
    live = SegmentMemory((torch.ones(1, 2, 3, requires_grad=True),))
    assert not live.detach().states[0].requires_grad


def test_encoder_with_memory():
    """Two-directional inside the segment, as in XLNet's fine-tuning; the memory is earlier text."""
    config = XFormerConfig(
        vocab_size=99,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        intermediate_size=8,
        position="none",
        attention="transformer_xl",
        stack="segment_recurrent",
    )
    torch.manual_seed(0)
    model, ids = make_strong(XFormerForMaskedLM(config).double().eval()), tokens(2, 9)
    with torch.no_grad():
        memory = model(ids[:, :4]).segment_memory
        # In one layer, whose memory is the embeddings, the segment sees the text so far: the whole text's last rows.
        close(model(ids[:, 4:], segment_memory=memory).logits, model(ids).logits[:, 4:], 1e-10)


def check_refused_memories(model):
    ids = tokens(2, 5)
    memory = model(ids, use_cache=False).segment_memory
    with pytest.raises(ValueError, match="the same rows"):
        model(ids[:1], segment_memory=memory)
    with pytest.raises(TypeError, match="SegmentMemory"):
        model(ids, segment_memory=memory.states)


def test_refusals():
    model, ids = build(4), tokens(2, 5)
    check_refused_memories(model)
    memory = model(ids).segment_memory
    with pytest.raises(ValueError, match="leave one of them out"):
        model(ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]] * 2), segment_memory=memory, use_cache=False)
    with pytest.raises(ValueError, match="one tower"):
        XFormerForSeq2SeqLM(XFormerConfig(attention="transformer_xl", stack="segment_recurrent", position="none"))
