"""Same-layer recurrence and retrospective reading against the equations written out."""

import pytest
import torch

from hf_xformers.core.segment_memory import SegmentMemory
from hf_xformers.variants.ernie_doc import (
    XFErnieDocConfig,
    XFErnieDocForCausalLM,
    XFErnieDocForMaskedLM,
)
from tests.attention.score_helpers import softmax_by_rows, split_heads
from tests.helpers import close, make_strong, pad, tokens

WIDTH, HEADS, SEGMENT, LAYERS = 16, 2, 4, 2
HEAD = WIDTH // HEADS


def build(cls=XFErnieDocForMaskedLM, attention=None, memory=SEGMENT, **stack):
    fields = {"share_biases": False, "distances": "learned", "key_types": 3, **(attention or {})}
    config = XFErnieDocConfig(
        vocab_size=99,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=8,
        max_position_embeddings=SEGMENT,
        pad_token_id=0,
        attention={"type": "transformer_xl", **fields},
        stack={"type": "segment_recurrent", "memory_length": memory, "recurrence": "same_layer", **stack},
    )
    torch.manual_seed(0)
    return make_strong(cls(config).double().eval(), amount=0.3)


def scores(layer, tables, queries, keys, types):
    """Scores [B, H, t, s] of the last tokens, pair by pair: content, learned distance, type of the key."""
    attention = layer.attention
    query, key = split_heads(attention.q_proj(queries), HEAD), split_heads(attention.k_proj(keys), HEAD)
    length, count = query.shape[2], key.shape[2]
    found = torch.zeros(query.shape[0], HEADS, length, count, dtype=torch.float64)
    for i in range(length):
        for j in range(count):
            distance = tables.distances.weight[SEGMENT + count - length + i - j]
            relative = attention.r_proj(tables.distance_norm(distance)).view(HEADS, HEAD)
            for row in range(query.shape[0]):
                kind = attention.t_proj(tables.type_norm(tables.types.weight[types[row, j]])).view(HEADS, HEAD)
                for h in range(HEADS):
                    q = query[row, h, i]
                    found[row, h, i, j] = (
                        (q + attention.content_bias[h]) @ key[row, h, j]
                        + (q + attention.position_bias[h]) @ relative[h]
                        + (q + attention.type_bias[h]) @ kind[h]
                    ) / HEAD**0.5
    return found


def one_segment(model, ids, types, memory):
    """Logits and what each layer gave, from the equations; memory: one [B, M, D] per layer."""
    tower = model.model.trunk
    tables, states, given = tower.layers[0].attention.relative, tower.embedding.norm(tower.embedding.tokens(ids)), []
    for layer, earlier in zip(tower.layers, memory, strict=True):
        attention, keys = layer.attention, torch.cat([earlier, states], dim=1)
        kinds = torch.cat([types[:, :1].expand(-1, earlier.shape[1]), types], dim=1)
        allowed = torch.ones(1, 1, ids.shape[1], keys.shape[1]).bool()
        weights = softmax_by_rows(scores(layer, tables, states, keys, kinds), allowed)
        mixed = (weights @ split_heads(attention.v_proj(keys), HEAD)).transpose(1, 2).flatten(2)
        states = layer.attention_residual.norm(states + attention.o_proj(mixed))
        inner = torch.nn.functional.gelu(layer.feedforward.up_proj(states))
        states = layer.feedforward_residual.norm(states + layer.feedforward.down_proj(inner))
        given.append(states)
    return model.lm_head(states), given


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_equations(implementation):
    model, ids = build(retrospective=False), tokens(2, 11)
    model.set_attn_implementation(implementation)
    types = torch.tensor([[0, 0, 1, 1, 2, 2, 0, 0, 1, 2, 1], [2] * 4 + [1, 0, 1] + [0] * 4])
    memory, carried, begin = [torch.zeros(2, 0, WIDTH, dtype=torch.float64)] * LAYERS, None, 0
    for length in (4, 3, 4):
        part = slice(begin, begin + length)
        begin += length
        with torch.no_grad():
            expected, given = one_segment(model, ids[:, part], types[:, part], memory)
            output = model(ids[:, part], token_type_ids=types[:, part], segment_memory=carried)
        close(output.logits, expected, 1e-10)
        memory = [torch.cat(pair, dim=1)[:, -SEGMENT:] for pair in zip(memory, given)]
        carried = output.segment_memory
        for one, other in zip(carried.states, memory, strict=True):
            close(one, other, 1e-10)


def segments(model, ids, memory=None):
    """Logits of consecutive segments of SEGMENT tokens, one per call."""
    found = []
    for begin in range(0, ids.shape[1], SEGMENT):
        output = model(ids[:, begin : begin + SEGMENT], segment_memory=memory)
        memory = output.segment_memory
        found.append(output.logits)
    return torch.cat(found, dim=1), memory


def test_a_document_is_read_twice():
    """One call equals two readings by hand, of which the second begins with the first one's memory."""
    model, ids = build(), tokens(2, 11)
    with torch.no_grad():
        first, memory = segments(model, ids)
        second, last = segments(model, ids, memory)
        output = model(ids)
    close(output.logits, second, 1e-12)
    assert isinstance(output.segment_memory, SegmentMemory)
    close(output.segment_memory.states[1], last.states[1], 1e-12)
    changed = ids.clone()
    changed[:, -1] = 5 + (ids[:, -1] - 4) % 90
    with torch.no_grad():
        close(segments(model, changed)[0][:, :8], first[:, :8], 1e-14)
        assert (model(changed).logits - output.logits)[:, :4].abs().amax() > 1e-9
    once = build(segment_length=SEGMENT, retrospective=False)
    with torch.no_grad():
        close(once(ids).logits, first, 1e-12)


@pytest.mark.parametrize("side", ["right", "left"])
def test_documents_of_a_batch(side):
    """Each is what it is alone, at any length, wherever it is padded; what is padding alone has no effect."""
    model, rows = build(), [tokens(13)[:length] for length in (13, 9, 4, 1)]
    with torch.no_grad():
        alone = [model(row[None]).logits[0] for row in rows]
        ids, mask = pad([*rows, rows[0][:0]], 15, side, seed=3)
        output = model(ids, attention_mask=mask)
    for row, expected in enumerate(alone):
        close(output.logits[row][mask[row].bool()], expected, 1e-12)
    assert output.logits.isfinite().all()


def test_decoder():
    """Causal, with same-layer recurrence: nothing of the future, and generation goes on after a memory."""
    model, ids = build(XFErnieDocForCausalLM), tokens(2, 7)
    with torch.no_grad():
        memory = model(tokens(2, 5, seed=4)).segment_memory
        whole = model(ids, segment_memory=memory).logits
        close(model(ids[:, :4], segment_memory=memory).logits, whole[:, :4], 1e-12)
        texts = [
            model.generate(ids[:, :3], max_new_tokens=4, do_sample=False, use_cache=cached, segment_memory=memory)
            for cached in (True, False)
        ]
    assert torch.equal(*texts) and not torch.equal(texts[0], model.generate(ids[:, :3], max_new_tokens=4))


def test_refusals():
    model, ids = build(), tokens(2, 7)
    with pytest.raises(ValueError, match="one segment per call"):
        model(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="one document per row"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2))
