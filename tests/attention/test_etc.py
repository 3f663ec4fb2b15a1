"""ETC's two streams against its equations as loops over pairs of tokens."""

import pytest
import torch

from hf_xformers.variants.etc import XFETCConfig, XFETCModel
from tests.attention.score_helpers import GEOMETRY
from tests.helpers import close, make_strong, tokens

RADIUS, SIZE, MOST, LABELS = 3, 4, 2, 9
HEADS, D = 4, 4


def build(implementation="sdpa", attention=(), position=(), layers=1, size=SIZE):
    torch.manual_seed(0)
    config = XFETCConfig(
        **{**GEOMETRY, "num_hidden_layers": layers},
        type_vocab_size=0,
        attention={"type": "etc", "local_radius": RADIUS, **dict(attention)},
        stack={"type": "etc", "tokens_per_global": size},
        position={"type": "etc_relative", "max_distance": MOST, "relative_vocab_size": LABELS, **dict(position)},
    )
    config._attn_implementation = implementation
    return make_strong(XFETCModel(config).double().eval(), amount=0.4)


def label(i, j, of):
    """of: for each token its stream, its place in that and the global token that stands for it."""
    (stream, place, summary), (other, there, belongs) = of[i], of[j]
    if stream != other:
        return 2 * MOST + (2 if summary == belongs else 1)
    distance = there - place
    return min(distance, MOST) if distance >= 0 else MOST + min(-distance, MOST)


@torch.no_grad()
def by_hand(model, ids, parts):
    """What the first layer's attention gives to one text [T, D] and to its global tokens; parts: of each token."""
    trunk, spec = model.trunk, model.config.attention
    layer = trunk.layers[0].attention
    terms, hard = layer.position_terms, model.config.position
    states = trunk.embedding(trunk.embedding.lookup(ids[None]), None, torch.arange(len(ids))[None], trunk.position)[0]
    count = max(parts) + 1
    states = torch.cat([states, trunk.stack.token.expand(count, -1)])
    of = [("long", place, part) for place, part in enumerate(parts)] + [("global", n, n) for n in range(count)]
    found = torch.zeros(len(of), HEADS * D, dtype=torch.float64)
    for i, (stream, place, part) in enumerate(of):
        own = stream == "global"
        names = [f"{n}_global_proj" if own and not spec.share_qkv_projections else f"{n}_proj" for n in "qkv"]
        q, k, v = (getattr(layer, name) for name in names)
        table, bias = (terms.global_table, terms.global_bias) if own else (terms.long_table, terms.long_bias)
        for h in range(HEADS):
            at = slice(h * D, (h + 1) * D)
            scores, values = [], []
            for j, (other, there, belongs) in enumerate(of):
                if stream == other == "long" and abs(place - there) > RADIUS:
                    continue
                crosses = stream != other and part != belongs
                if crosses and (hard.hard_g2l if own else hard.hard_l2g):
                    continue
                kind, query = label(i, j, of), q(states[i])[at]
                scores.append(
                    ((query * k(states[j])[at]).sum() + (query * table[h, kind]).sum() + bias[h, kind]) / D**0.5
                )
                values.append(v(states[j])[at])
            weights = torch.stack(scores).exp()
            found[i, at] = (weights[:, None] * torch.stack(values)).sum(0) / weights.sum()
    project = layer.o_proj if spec.share_output_projection else layer.global_o_proj
    return torch.cat([layer.o_proj(found[: len(parts)]), project(found[len(parts) :])])


def first_attention(model, ids, mask=None, **more):
    """The output of the first layer's attention, as it comes [B, T + G, D]."""
    seen = []
    handle = model.trunk.layers[0].attention.register_forward_hook(lambda m, i, output: seen.append(output[0]))
    with torch.no_grad():
        model(ids, attention_mask=mask, **more)
    handle.remove()
    return seen[0]


CASES = {
    "plain": {},
    "hard_g2l": {"position": {"hard_g2l": True}},
    "hard_both": {"position": {"hard_g2l": True, "hard_l2g": True}},
    "own_projections": {"attention": {"share_qkv_projections": False}},
    "shared_output": {"attention": {"share_output_projection": True}},
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equations(case, implementation):
    model = build(implementation, **case)
    for length in (14, 3, 1):
        ids = tokens(length, high=50)
        expected = by_hand(model, ids, [i // SIZE for i in range(length)])
        close(first_attention(model, ids[None])[0], expected)
        for lead in (0, 3):
            padded, mask = tokens(2, length + 3, seed=1, high=50), torch.zeros(2, length + 3, dtype=torch.long)
            padded[0, lead : lead + length], mask[0, lead : lead + length] = ids, 1
            found = first_attention(model, padded, mask)
            close(found[0, lead : lead + len(expected)], expected)  # global tokens stand behind the text
            assert found.isfinite().all()


def test_sentences():
    """Global tokens stand for sentences of any length, another number of them in each row."""
    model, ids = build(), tokens(2, 9, high=50)
    sentences = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 4, 4], [7, 7, 7, 7, 7, 7, 7, 7, 7]])
    found = first_attention(model, ids, sentence_ids=sentences)
    for row, parts in enumerate(([0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9)):
        expected = by_hand(model, ids[row], parts)
        close(found[row, : len(expected)], expected)


@torch.no_grad()
def test_tokens_that_the_caller_chooses_are_global_too():
    """In one layer the first token reads the last one then alone, whatever padding is before it."""
    model, ids = build(), tokens(1, 24, high=50)
    ids[0, 0] = 0
    mask, changed = (ids != 0).long(), ids.clone()
    changed[0, -1] = 5 + (ids[0, -1] - 4) % 40
    for more in ({}, {"attention_mask": mask}):
        for chosen in (0, 1):
            given = {**more, "global_attention_mask": torch.eye(24).long()[[1]] * chosen}
            one, other = (model(x, **given).last_hidden_state[0, 1] for x in (ids, changed))
            assert torch.equal(one, other) == (not chosen)
