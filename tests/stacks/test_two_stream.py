"""XLNet's two streams against a loop over tokens."""

import pytest
import torch

from hf_xformers import XFXLNetConfig, XFXLNetForMaskedLM, XFXLNetModel
from tests.attention.score_helpers import small_blocks
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24)


def model_of(kind=XFXLNetModel, implementation="sdpa", **fields):
    config = XFXLNetConfig(**{**SIZES, **NO_DROPOUT, "layer_norm_eps": 1e-5, **fields})
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return make_strong(kind(config), amount=0.4).double().eval()


def orders(batch, length, seed=0):
    """A random order for each row -> its places in turn [B, T], and `perm_mask`: 1 where j does not come before i."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.stack([torch.randperm(length, generator=generator) for _ in range(batch)])
    rank = turn.argsort(-1)
    return turn, (rank[:, None, :] >= rank[:, :, None]).double()


def one_hot(places, length):
    return torch.nn.functional.one_hot(places, length).double()


@torch.no_grad()
def by_hand(model, ids, types, real, order, places):
    """The two streams of one text, token by token and head by head -> g of the targets [M, D]."""
    trunk = model.trunk
    content = [trunk.embedding.tokens.weight[token] for token in ids]
    queries = [trunk.stack.start for _ in places]
    for layer in trunk.layers:
        a = layer.attention
        d = a.head_dim

        def attend(state, place, seen, a=a, d=d, content=content):
            parts = []
            for h in range(a.num_heads):
                q, scores, values = a.q_proj(state).view(-1, d)[h], [], []
                for j in seen:
                    angles = (place - j) * 10000.0 ** -(torch.arange(0, 16, 2).double() / 16)
                    r = a.r_proj(torch.cat([angles.sin(), angles.cos()])).view(-1, d)[h]
                    same = a.segment_table[int(types[place] == types[j]), h]
                    score = (q + a.content_bias[h]) @ a.k_proj(content[j]).view(-1, d)[h]
                    score = score + (q + a.position_bias[h]) @ r + (q + a.segment_bias[h]) @ same
                    scores.append(score / d**0.5)
                    values.append(a.v_proj(content[j]).view(-1, d)[h])
                parts.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values) if seen else q * 0)
            x = layer.attention_residual.norm(state + a.o_proj(torch.cat(parts)))
            return layer.feedforward_residual.norm(x + layer.feedforward(x, None).output)

        before = [[j for j in range(len(ids)) if real[j] and not order[i][j]] for i in range(len(ids))]
        queries = [attend(g, p, before[p]) for g, p in zip(queries, places, strict=True)]
        content = [attend(h, i, sorted({*before[i], i} if real[i] else before[i])) for i, h in enumerate(content)]
    return torch.stack(queries)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_equation(side, implementation):
    model, length = model_of(implementation=implementation), 7
    ids, types = tokens(2, length, high=50), torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]])
    real = torch.ones(2, length).bool()
    if side != "none":
        real[1] = torch.arange(length) >= 3 if side == "left" else torch.arange(length) < 4
    turn, order = orders(2, length)
    places = torch.stack([turn[b][real[b][turn[b]]][-3:] for b in range(2)])  # real ones, late in the order
    given = {"input_ids": ids, "token_type_ids": types, "perm_mask": order}
    given |= {"attention_mask": None if side == "none" else real.long(), "target_mapping": one_hot(places, length)}
    with torch.no_grad(), small_blocks(2):
        found = model(**given).last_hidden_state
    for b in range(2):
        close(found[b], by_hand(model, ids[b], types[b], real[b], order[b], places[b].tolist()), 1e-8)


def test_paths_agree_with_gradients():
    """Equal outputs and gradients on both paths, first targets that see nothing and rows without target included."""
    ids, (turn, order) = tokens(2, 9, high=50), orders(2, 9, seed=3)
    mapping = one_hot(turn[:, :4], 9)
    mapping[1, 2] = 0.0
    found = {}
    for implementation in ("eager", "sdpa"):
        model = model_of(XFXLNetForMaskedLM, implementation)
        labels = ids.gather(1, turn[:, :4]).masked_fill(mapping.sum(-1) == 0, -100)
        output = model(ids, perm_mask=order, target_mapping=mapping, labels=labels)
        output.loss.backward()
        found[implementation] = [output.logits, *(p.grad for p in model.parameters())]
        assert output.logits.shape == (2, 4, 50)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert model.model.trunk.stack.start.grad.abs().sum() > 0
    for fast, literal in zip(found["sdpa"], found["eager"], strict=True):
        close(fast.detach(), literal.detach(), 1e-8)


def test_content_alone():
    """Without targets the content stream is the output; an order in which all see all is none."""
    model, ids = model_of(), tokens(2, 6, high=50)
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        close(model(ids, perm_mask=torch.zeros(2, 6, 6)).last_hidden_state, plain)
        turn, order = orders(2, 6)
        assert (model(ids, perm_mask=order).last_hidden_state - plain).abs().max() > 1e-3
        targets = one_hot(turn[:, :2], 6)
        states = model(ids, target_mapping=targets, output_hidden_states=True)
    assert states.last_hidden_state.shape == (2, 2, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"perm_mask": torch.zeros(2, 5, 6)}, "`perm_mask` must be"),
        ({"target_mapping": torch.zeros(2, 5)}, "`target_mapping` must be"),
        ({"target_mapping": torch.ones(2, 1, 6)}, "marks several tokens for one target"),
    ],
)
def test_inputs_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        model_of()(tokens(2, 6, high=50), **given)
