"""Memory slots: writing against loops over slots; replay against back-propagation in time."""

import pytest
import torch

from hf_xformers.stacks.memformer import normalized
from hf_xformers.training.replay import replay_backward
from hf_xformers.variants.memformer import (
    XFMemformerConfig,
    XFMemformerForCausalLM,
    XFMemformerForSeq2SeqLM,
)
from hf_xformers.variants.transformer_xl import XFTransformerXLConfig, XFTransformerXLForCausalLM
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens
from tests.stacks.test_segment_recurrent import check_refused_memories

WIDTH, HEADS, SLOTS = 16, 2, 3
HEAD = WIDTH // HEADS
SIZES = {
    "vocab_size": 99,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def build(cls=XFMemformerForCausalLM, dropout=False, **stack):
    stack = {"type": "memformer", "num_slots": SLOTS, **stack}
    fields = {} if dropout else NO_DROPOUT
    torch.manual_seed(0)
    return make_strong(cls(XFMemformerConfig(**SIZES, **fields, stack=stack)).double().eval(), amount=0.3)


def written_by_hand(stack, slots, states, update):
    """The slots after a segment, one at a time."""
    writer, found = stack.writer, torch.zeros_like(slots)
    for row in range(slots.shape[0]):
        for i in range(slots.shape[1]):
            slot, read = slots[row, i], []
            for h in range(HEADS):
                part = slice(h * HEAD, (h + 1) * HEAD)
                query = writer.q_proj(slot)[part]
                keys = [writer.k_proj(slot)[part], *(writer.token_k_proj(x)[part] for x in states[row])]
                values = [slot[part], *(writer.v_proj(x)[part] for x in states[row])]
                weights = torch.stack([query @ key for key in keys]) / (0.5 * HEAD**0.5)
                read.append(torch.softmax(weights, 0) @ torch.stack(values))
            read = torch.cat(read)
            if update == "bmn":
                total = read + stack.slots[i]
                found[row, i] = total / total.norm()
                continue
            cell = torch.nn.GRUCell(WIDTH, WIDTH).double()
            cell.weight_ih, cell.bias_ih = writer.input_gates.weight, writer.input_gates.bias
            cell.weight_hh, cell.bias_hh = writer.slot_gates.weight, writer.slot_gates.bias
            slot = cell(read[None], slot[None])[0]
            found[row, i] = slot + writer.down_proj(torch.relu(writer.up_proj(writer.norm(slot))))
    return found


@pytest.mark.parametrize("update", ["bmn", "gru"])
def test_writing(update):
    model, ids = build(update=update), tokens(2, 5)
    stack = model.model.trunk.stack
    with torch.no_grad():
        first = model(ids).segment_memory
        second = model(ids.flip(1), segment_memory=first).segment_memory
        states = []
        model.model.trunk.layers[-1].register_forward_hook(lambda module, args, output: states.append(output[0]))
        model(ids)
        model(ids.flip(1), segment_memory=first)
        start = (stack.slots / stack.slots.norm(dim=-1, keepdim=True)) if update == "bmn" else stack.slots
        close(first.states[0], written_by_hand(stack, start.expand(2, -1, -1), states[0], update), 1e-10)
        close(second.states[0], written_by_hand(stack, first.states[0], states[1], update), 1e-10)
    if update == "bmn":
        close(second.states[0].norm(dim=-1), torch.ones(2, SLOTS).double(), 1e-12)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_not_written(side):
    model, rows = build(), [tokens(7)[:length] for length in (7, 4, 1)]
    start = model(tokens(4, 5, seed=7)).segment_memory
    with torch.no_grad():
        alone = [
            model(row[None], segment_memory=start[index]).segment_memory.states[0][0] for index, row in enumerate(rows)
        ]
        ids, mask = pad([*rows, rows[0][:0]], 9, side, seed=3)
        found = model(ids, attention_mask=mask, segment_memory=start).segment_memory.states[0]
    for row, expected in enumerate([*alone, start.states[0][3]]):
        close(found[row], expected, 1e-12)


def test_memory_of_rows():
    """Rows forget and change places; the memory reaches later segments, and causality holds."""
    model, ids = build(), tokens(3, 5)
    with torch.no_grad():
        memory = model(tokens(3, 5, seed=2)).segment_memory
        fresh, whole = model(ids).logits, model(ids, segment_memory=memory).logits
        reset = model(ids, segment_memory=memory.reset(torch.tensor([True, False, True]))).logits
        close(reset[[0, 2]], fresh[[0, 2]], 1e-12)
        close(reset[1], whole[1], 1e-12)
        assert (whole - fresh).abs().amax() > 1e-6
        order = torch.tensor([2, 0, 1])
        close(model(ids[order], segment_memory=memory.reorder(order)).logits, whole[order], 1e-12)
        close(model(ids[:, :3], segment_memory=memory).logits, whole[:, :3], 1e-12)
        texts = [
            model.generate(ids[:, :3], max_new_tokens=4, do_sample=False, use_cache=cached, segment_memory=memory)
            for cached in (True, False)
        ]
    assert torch.equal(*texts)


def test_encoder_decoder():
    """The encoder reads and writes; what it has written changes what the decoder says of the next segment."""
    model, ids = build(XFMemformerForSeq2SeqLM), tokens(2, 6)
    with torch.no_grad():
        output = model(ids, labels=ids)
        later = model(ids, labels=ids, segment_memory=output.segment_memory)
        assert output.segment_memory.states[0].shape == (2, SLOTS, WIDTH)
        assert (output.logits - later.logits).abs().amax() > 1e-6
        plain = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        remembered = model.generate(
            ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, segment_memory=output.segment_memory
        )
    assert plain.shape == remembered.shape


def through_time(model, segments):
    """Losses and gradients of back-propagation through time: one graph of all segments."""
    memory, losses = None, []
    for ids in segments:
        output = model(ids, labels=ids, segment_memory=memory, use_cache=False)
        memory = output.segment_memory
        losses.append(output.loss)
    torch.stack(losses).sum().backward()
    return losses


@pytest.mark.parametrize("update", ["bmn", "gru"])
def test_replay_is_back_propagation_through_time(update):
    """With dropout on; and the generators end where one reading leaves them."""
    model, found = build(dropout=True, update=update).train(), []
    segments = [tokens(2, 5, seed=seed) for seed in range(4)]
    for replayed in (False, True):
        torch.manual_seed(5)
        model.zero_grad()
        if replayed:
            inputs = [{"input_ids": ids, "labels": ids, "use_cache": False} for ids in segments]
            losses, memory = replay_backward(model, inputs)
            assert not memory.states[0].requires_grad
        else:
            losses = through_time(model, segments)
        slopes = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        found.append((torch.stack(losses).detach(), slopes, torch.get_rng_state()))
    close(found[1][0], found[0][0], 1e-12)
    assert torch.equal(found[1][2], found[0][2])
    for name, slope in found[0][1].items():
        close(found[1][1][name], slope, 1e-10)
    assert found[0][1]["model.trunk.stack.writer.v_proj.weight"].abs().max() > 1e-6


def test_normalized_in_half_precision():
    large = torch.full((1, 4096), 200.0, dtype=torch.float16)  # the sum of squares is beyond float16
    close(normalized(large).float().norm(dim=-1), torch.ones(1), 1e-2)


def test_refusals():
    model, ids = build(), tokens(2, 5)
    check_refused_memories(model)
    xl = XFTransformerXLForCausalLM(XFTransformerXLConfig(**SIZES))
    with pytest.raises(ValueError, match="has no gradient"):
        replay_backward(xl, [{"input_ids": ids}])
    with pytest.raises(ValueError, match="one segment at least"):
        replay_backward(model, [])
