"""BP-Transformer: a whole model against loops over the tree, decoding after a step back, the cost of a step."""

import pytest
import torch

from hf_xformers.core.cache import make_cache
from hf_xformers.variants import family
from tests.helpers import make_strong
from tests.ops.test_binary_partition import spans

COUNT, CLIP = 2, 2


def model(head, **fields):
    members = family("xf_bp_transformer")
    config = members["Model"].config_class(
        **{
            "vocab_size": 30,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 12,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "attention": {"type": "bp_transformer", "nodes_per_level": COUNT, "max_level": CLIP},
            **fields,
        }
    )
    torch.manual_seed(0)
    return make_strong(members[head](config).double().eval())


def walk(leaf, leaves, causal):
    """What a leaf reads, (first token, width, label): `COUNT` nodes a level outward, or a child."""
    found = [(leaf, 1, 0)]
    for side in (-1,) if causal else (-1, 1):
        edge = leaf if side < 0 else leaf + 1
        level = 0
        while 0 < edge < leaves or (side < 0 and edge > 0):
            for turn in range(1, COUNT + 1):
                if not (0 < edge if side < 0 else edge < leaves):
                    break
                width = 2**level if edge % 2**level == 0 else 2 ** (level - 1)
                label = (2 * COUNT + 1) * min(level, CLIP) + 2 * turn - (1 if side < 0 else 0)
                found.append((edge - width if side < 0 else edge, width, label))
                edge += side * width
            level += 1
    return found


def number_of_nodes(leaves, causal):
    """(first token, width) -> place among all nodes: leaves, then spans by level or by their last token."""
    nodes, width = [], 2
    while width // 2 < leaves:
        nodes += [(first, width) for first in range(0, leaves, width)]
        width *= 2
    if causal:
        nodes = sorted((n for n in nodes if sum(n) <= leaves), key=lambda n: (sum(n), n[1]))
    return {node: place for place, node in enumerate([(leaf, 1) for leaf in range(leaves)] + nodes)}


def by_loops(layer, states, of_spans, listed, causal):
    """One layer, token by token and span by span."""
    attention, leaves = layer.attention, states.shape[0]
    everything = torch.cat([states, of_spans])
    q, k, v = (getattr(attention, f"{n}_proj")(everything).view(len(everything), 2, 4) for n in "qkv")
    rows, numbers = [], number_of_nodes(leaves, causal)
    for leaf in range(leaves):
        read = walk(leaf, leaves, causal)
        at = [numbers[first, width] for first, width, _ in read]
        vectors = attention.relative_key[[label for *_, label in read]]
        scores = torch.einsum("hd,nhd->hn", q[leaf], k[at] + vectors[:, None]) / 2
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v[at]).flatten())
    for number, span in enumerate(listed):
        inside = list(span)
        scores = torch.einsum("hd,nhd->hn", q[leaves + number], k[inside]) / 2
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v[inside]).flatten())
    read = attention.o_proj(torch.stack(rows)) if rows else everything
    mixed = layer.attention_residual.norm(everything + read)
    inner = layer.feedforward
    mapped = inner.down_proj(torch.nn.functional.gelu(inner.up_proj(mixed)))
    return layer.feedforward_residual.norm(mixed + mapped).split([leaves, len(listed)])


@pytest.mark.parametrize("length", [1, 2, 11, 16])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_two_layers_equal_loops(causal, length):
    made = model("Model", is_decoder=causal, feedforward="gelu")
    trunk, listed = made.trunk, spans(length, causal)
    states = torch.randn(length, 8, dtype=torch.float64)
    found = made(inputs_embeds=states[None])
    tokens = trunk.embedding(states[None], None, torch.arange(length)[None], trunk.position)[0]
    of_spans = tokens.new_zeros(len(listed), 8)
    for layer in trunk.layers:
        tokens, of_spans = by_loops(layer, tokens, of_spans, listed, causal)
    torch.testing.assert_close(found.last_hidden_state[0], tokens)
    if not causal:
        torch.testing.assert_close(found.pooler_output[0], of_spans[-1] if length > 1 else tokens[0])


@torch.no_grad()
def test_decoding_in_pieces_and_after_a_step_back():
    """Rows of different lengths complete spans at different steps; tokens that were dropped leave none behind."""
    made = model("ForCausalLM", is_decoder=True)
    ids, mask = torch.randint(0, 30, (3, 60)), torch.ones(3, 60).long()
    mask[1, :5], mask[2, :18] = 0, 0
    whole, cache, logits = made(ids, attention_mask=mask).logits, make_cache(made.config), []
    position = 0
    for piece in (6, 1, 1, 30, 3, 1):
        end = position + piece
        wrong = (ids[:, position:end] + 1) % 30
        made(wrong, attention_mask=mask[:, :end], past_key_values=cache)
        cache.crop(-piece)
        result = made(ids[:, position:end], attention_mask=mask[:, :end], past_key_values=cache)
        logits.append(result.logits)
        position = end
    found, real = torch.cat(logits, 1), mask[:, :position].bool()
    torch.testing.assert_close(found[real], whole[:, :position][real])


def test_a_decoding_step_reads_few_keys(monkeypatch):
    """O(k log T) of them, and the tokens of spans that the step completes."""
    from hf_xformers.attention import bp_transformer

    read = []
    kept = bp_transformer.few_leaves

    def counted(query, key, value, real, relative, nodes, **options):
        read.append(int((nodes[0] >= 0).sum(-1).max()))
        return kept(query, key, value, real, relative, nodes, **options)

    monkeypatch.setattr(bp_transformer, "few_leaves", counted)
    made = model("ForCausalLM", is_decoder=True, num_hidden_layers=1)
    counts = {}
    with torch.no_grad():
        for length in (64, 512):
            cache = make_cache(made.config)
            made(torch.zeros(1, length).long(), past_key_values=cache)
            made(torch.zeros(1, 1).long(), past_key_values=cache)
            counts[length] = read[-1]
            assert cache.layers[0].labels.shape[-1] == length - 1  # complete spans: fewer than tokens
    assert counts[64] <= 1 + COUNT * 7 and counts[512] - counts[64] <= COUNT * 3
