"""Sparse Sinkhorn attention against its definition, one block and one place at a time, and its limits."""

import math

import pytest
import torch
from transformers import StaticCache

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention import sinkhorn_transformer
from hf_xformers.core.cache import make_cache, stateful_part
from hf_xformers.ops.sinkhorn import sinkhorn
from tests.attention.linear_helpers import check_no_future, in_pieces
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    make_context,
    run_layers,
    saved_sizes,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS
SPECS = {
    "plain": {"type": "sinkhorn_transformer", "block_size": 4},
    "short": {"type": "sinkhorn_transformer", "block_size": 2, "iterations": 3, "temperature": 0.2},
    "one_block": {"type": "sinkhorn_transformer", "block_size": 16},
}
CUT = {"type": "sinkhorn_transformer", "block_size": 2, "sortcut_blocks": 2}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
MASK = torch.ones(3, 13).bool()
MASK[0, :6], MASK[1, 6:], MASK[2] = False, False, False


def normalised(scores, iterations, causal):
    """[n, n] by rows and columns in turn, entry by entry; the last division is that of rows."""
    count = len(scores)
    p = {(c, u): math.exp(scores[c][u]) for c in range(count) for u in range(c if causal else count)}

    def by_rows(p):
        return {(c, u): x / sum(p[c, w] for w in range(count) if (c, w) in p) for (c, u), x in p.items()}

    for _ in range(iterations):
        p = by_rows(p)
        p = {
            (c, u): x / sum(p[w, u] for w in range(c + 1 if causal else count) if (w, u) in p)
            for (c, u), x in p.items()
        }
    return by_rows(p)


@torch.no_grad()
def by_hand(layer, states, mask=None):
    """Each row by itself, without its padding."""
    spec, size = layer.spec, layer.spec.block_size
    output = torch.zeros_like(states)
    for row, whole in enumerate(states):
        real = torch.arange(len(whole)) if mask is None else mask[row].nonzero()[:, 0]
        x, n = whole[real], -(-len(real) // size)
        if not n:
            output[row] = layer.o_proj(torch.zeros(WIDTH, dtype=torch.float64))
            continue
        q, k, v = (split_heads(part(x)[None], D)[0] for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        k, v = (t.repeat_interleave(HEADS // len(t), 0) for t in (k, v))
        if layer.is_causal:
            pooled = torch.stack([x[: c * size + 1].mean(0) for c in range(n)])
        else:
            pooled = torch.stack([x[c * size : c * size + size].mean(0) for c in range(n)])
        scores = layer.sort_out(torch.relu(layer.sort_in(pooled))).view(n, HEADS, -1)[..., :n] / spec.temperature
        found = torch.zeros(len(real), HEADS, D, dtype=torch.float64)
        for h in range(HEADS):
            p = normalised(scores[:, h].tolist(), spec.iterations, layer.is_causal)

            def sorted_place(c, s):
                """Key, value and share of real tokens."""
                parts = [(p[c, u], u * size + s) for u in range(n) if (c, u) in p and u * size + s < len(real)]
                share = sum(weight for weight, _ in parts)
                if not share:
                    return None
                return (*(sum(w * t[h, j] for w, j in parts) / share for t in (k, v)), math.log(share))

            for i in range(len(real)):
                c, entries = i // size, []
                if spec.sortcut_blocks:
                    entries = [sorted_place(b, s) for b in range(min(n, spec.sortcut_blocks)) for s in range(size)]
                else:
                    own = range(c * size, min(c * size + size, len(real)))
                    entries = [sorted_place(c, s) for s in range(size)]
                    entries += [(k[h, j], v[h, j], 0.0) for j in own if j <= i or not layer.is_causal]
                entries = [entry for entry in entries if entry]
                logits = torch.stack([q[h, i] @ key / D**0.5 + log for key, _, log in entries])
                found[i, h] = torch.softmax(logits, -1) @ torch.stack([value for _, value, _ in entries])
        output[row] = layer.o_proj(torch.zeros(WIDTH, dtype=torch.float64))
        output[row, real] = layer.o_proj(found.flatten(1))
    return output


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_equation(name, implementation, causal):
    (layer,) = build_layers(SPECS[name], causal=causal, num_key_value_heads=2, strong=0.6)
    for mask, batch, length in ((None, 1, 13), (None, 2, 8), (MASK, 3, 13), (PADDING, 4, 6), (None, 1, 1)):
        states = vectors(batch, length)
        context = make_context(length, causal, padding_mask=mask, implementation=implementation)
        close(run_layers([layer], states, context)[0].output.detach(), by_hand(layer, states, mask), 1e-8)


@each_path
def test_sortcut(implementation):
    (layer,) = build_layers(CUT, strong=0.6)
    for mask, batch, length in ((None, 2, 8), (MASK, 3, 13), (None, 1, 3), (None, 1, 1)):
        states = vectors(batch, length)
        context = make_context(length, padding_mask=mask, implementation=implementation)
        close(run_layers([layer], states, context)[0].output.detach(), by_hand(layer, states, mask), 1e-8)


@pytest.mark.parametrize("causal", [False, True])
def test_weights_and_gradients(causal):
    """Weights sum to one over the tokens there are; gradients of the fast path are those of the literal one."""
    (layer,), found = build_layers(SPECS["short"], causal=causal, strong=0.6), []
    for implementation in ("eager", "sdpa"):
        layer.zero_grad()
        states = vectors(3, 13).requires_grad_()
        context = make_context(13, causal, padding_mask=MASK, implementation=implementation)
        (result,) = run_layers([layer], states, context)
        if implementation == "eager":
            weights = result.weights.detach()
            close(weights.sum(-1)[MASK[:, None].expand(-1, HEADS, -1)], torch.ones(13 * HEADS, dtype=torch.float64))
            assert (weights >= 0).all() and not weights[~MASK[:, None, None].expand_as(weights)].any()
        result.output[MASK].square().sum().backward()
        found.append({"states": states.grad} | {key: value.grad.clone() for key, value in layer.named_parameters()})
    for key, value in found[0].items():
        close(found[1][key], value, 1e-8)
        assert value.isfinite().all()
    assert found[1]["sort_in.weight"].any()


def test_token_by_token():
    """In pieces as at once, with padding on the left, and nothing of the future."""
    (layer,) = build_layers(SPECS["plain"], causal=True, num_key_value_heads=2, strong=0.6)
    states, mask = vectors(2, 23), torch.ones(2, 23).bool()
    mask[0, :5] = False
    with torch.no_grad():
        for seen in (None, mask):
            expected = run_layers([layer], states, make_context(23, True, padding_mask=seen))[0].output
            for pieces in ((1,) * 23, (9, 1, 1, 1, 2, 7, 1, 1), (4, 19)):
                close(in_pieces(layer, states, pieces, seen)[0], expected)
    check_no_future(layer, vectors(2, 23))


def test_limits_of_the_permutation():
    """The identity is attention within blocks, whose keys count twice; a permutation adds the keys of one other block
    and, with SortCut over all blocks, all of them."""
    size, length = 4, 12
    swap = torch.tensor([2, 0, 1])
    for order in (torch.arange(3), swap):
        for cut in (None, 3):
            spec = {"type": "sinkhorn_transformer", "block_size": size, "sortcut_blocks": cut}
            (layer,) = build_layers(spec)
            hard = torch.zeros(1, HEADS, 3, 3, dtype=torch.float64)
            hard[:, :, torch.arange(3), order] = 1
            layer.permutation = lambda pooled, counted, hard=hard: hard
            states = vectors(1, length)
            q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
            block = torch.arange(length) // size
            own = (block[:, None] == block).double()
            counts = torch.ones(length, length) if cut else own + (order[block][:, None] == block)
            logits = q @ k.mT / D**0.5 + counts.double().log().clamp(min=-1e9)
            weights = softmax_by_rows(logits, counts.bool())
            expected = layer.o_proj((weights @ v).transpose(1, 2).flatten(2))
            close(run_layers([layer], states, make_context(length))[0].output, expected)


def test_nearly_doubly_stochastic():
    scores = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    allowed = torch.ones(6, 6).bool()
    found = sinkhorn(scores, allowed, 50, False)
    for axis in (-1, -2):
        assert (found.sum(axis) - 1).abs().max() < 1e-3
    peaks = [sinkhorn(scores / heat, allowed, 200, False).amax(-1).mean() for heat in (1.0, 0.3, 0.1)]
    assert peaks[0] < peaks[1] < peaks[2] and peaks[2] > 0.85  # towards a hard permutation
    past = torch.ones(6, 6).bool().tril(-1)
    found, moved = (sinkhorn(s, past, 8, True) for s in (scores, scores + torch.arange(6)[:, None].gt(3) * scores))
    assert torch.equal(found[..., :4, :], moved[..., :4, :]) and not torch.equal(found, moved)
    assert not found.triu().any() and not found[..., 0, :].any()
    close(found[..., 1:, :].sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))


def test_what_is_kept():
    """Nothing in proportion to T x T but one number for each pair of blocks."""
    kept = []
    for length in (512, 1024):
        spec = {"type": "sinkhorn_transformer", "block_size": 32}
        (layer,) = build_layers(spec, causal=True, max_position_embeddings=1024)
        kept.append(sum(saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length, True)))))
    assert kept[1] < 2.4 * kept[0]


def test_longer_than_its_table():
    """Padding may be, and says nothing; a text may not."""
    (layer,) = build_layers(SPECS["plain"], max_position_embeddings=8)
    states, mask = vectors(2, 15), torch.ones(2, 15).bool()
    mask[0, :7], mask[1, 5:] = False, False
    found = run_layers([layer], states, make_context(15, padding_mask=mask))[0].output.detach()
    close(found, by_hand(layer, states, mask), 1e-8)
    with pytest.raises(ValueError, match="has 15 tokens, but this sinkhorn_transformer sorts 2 blocks of 4; shorten"):
        run_layers([layer], states, make_context(15))


@pytest.mark.parametrize("causal", [False, True])
def test_one_block_is_dense_attention(causal, monkeypatch):
    """Which a warning says, and nothing more than that: small models are allowed."""
    said = []
    monkeypatch.setattr(sinkhorn_transformer.logger, "warning_once", said.append)
    build_layers(SPECS["plain"], causal=causal, max_position_embeddings=5)
    assert not said
    (layer,) = build_layers(SPECS["plain"], causal=causal, max_position_embeddings=4)
    (dense,) = build_layers("dense", causal=causal, max_position_embeddings=4)
    assert "4 positions are one block of 4" in said[0]
    dense.load_state_dict(layer.state_dict(), strict=False)
    states, context = vectors(2, 4), make_context(4, causal)
    close(*(run_layers([each], states, context)[0].output for each in (layer, dense)), 1e-8)


def test_keeps_sums_beside_keys():
    """A cache that has no place for them is refused, not read wrongly."""
    config = XFormerConfig(**GEOMETRY, is_decoder=True, attention=SPECS["plain"])
    model = XFormerForCausalLM(config).eval()
    ids = torch.randint(config.vocab_size, (1, 5))
    with pytest.raises(ValueError, match="running sums beside keys and values, which the given StaticCache"):
        model(ids, past_key_values=StaticCache(config=config, max_cache_len=8))
    assert stateful_part(config) == "attention 'sinkhorn_transformer'" and make_cache(config).is_croppable


def test_refusals():
    for fields, message in (
        ({"block_size": 0}, "`block_size` >= 1, got 0"),
        ({"iterations": 0}, "`iterations` >= 1, got 0"),
        ({"temperature": 0}, "`temperature` > 0, got 0"),
        ({"sortcut_blocks": 0}, "`sortcut_blocks` >= 1, got 0"),
        ({"sortcut_blocks": 2, "is_decoder": True}, "sortcut_blocks=2 lets every token read the whole text"),
    ):
        decoder = {"is_decoder": True} if fields.pop("is_decoder", False) else {}
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, **decoder, attention={"type": "sinkhorn_transformer", **fields})
