"""Dynamic mask attention and the mask attention network: the multiplicative definition, limits, two caches."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from tests.attention.score_helpers import build_layers, make_context, run_layers, split_heads, vectors
from tests.helpers import close, make_strong, pad, tokens

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]).bool()


def layer(causal=False, relu=True, distance=3):
    return build_layers({"type": "dynamic_mask", "relu": relu, "max_distance": distance}, causal=causal)[0]


def by_definition(module, states, mask, causal):
    """M times the exponential of scores, divided by its sum: a loop over pairs."""
    query, key, value = (
        split_heads(projection(states), 4) for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    batch, heads, length, width = query.shape
    rows, factors = [], torch.zeros(batch, heads, length, length, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                total = torch.zeros(width, dtype=torch.float64)
                mass = torch.zeros((), dtype=torch.float64)
                for j in range(i + 1 if causal else length):
                    if not mask[b, j]:
                        continue
                    away = min(abs(i - j), module.distances.shape[1])
                    number = module.distances[0 if j < i else 1, away - 1] if away else 0.0
                    gate = states[b, i] @ module.query_gate.weight[0] + number + module.head_offset[h]
                    factor = 1 / (1 + torch.exp(-gate))
                    factors[b, h, i, j] = factor.detach()
                    power = factor * torch.exp(query[b, h, i] @ key[b, h, j] * width**-0.5)
                    total, mass = total + power * value[b, h, j], mass + power
                rows.append(total / mass if mass > 0 else total)
    joined = torch.stack(rows).view(batch, heads, length, width).transpose(1, 2).flatten(2)
    return module.o_proj(joined.relu() if module.spec.relu else joined), factors


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_multiplicative_definition(causal, relu):
    """Both paths, distances beyond the table, and gradients of every parameter."""
    module, states = layer(causal, relu), vectors(2, 7)
    expected, _ = by_definition(module, states, REAL, causal)
    slopes = []
    for wanted in (False, True):
        context = make_context(7, causal, padding_mask=REAL, output_attentions=wanted)
        (found,) = run_layers([module], states, context)
        close(found.output[REAL], expected[REAL])
        slopes.append(torch.autograd.grad(found.output[REAL].sin().sum(), list(module.parameters())))
    reference = torch.autograd.grad(expected[REAL].sin().sum(), list(module.parameters()))
    for own, other, third in zip(*slopes, reference, strict=True):
        close(own, other)
        close(own, third)


@torch.no_grad()
def test_limits():
    """Open masks are plain attention; masks that are closed off the diagonal map each token by itself."""
    states, context = vectors(2, 6), make_context(6)
    module = layer(relu=False)
    (plain,) = build_layers("dense")
    plain.load_state_dict({name: x for name, x in module.state_dict().items() if "proj" in name})
    module.query_gate.weight.zero_()
    module.distances.zero_()
    module.head_offset.fill_(50.0)
    close(run_layers([module], states, context)[0].output, run_layers([plain], states, make_context(6))[0].output)
    module.head_offset.zero_()
    module.distances.fill_(-80.0)
    close(run_layers([module], states, make_context(6))[0].output, module.o_proj(module.v_proj(states)))


def test_masks_depend_on_queries_alone():
    """The factors M of a row are the same whatever the keys say, and turn the right way."""
    module, states = layer(), vectors(1, 5)
    _, factors = by_definition(module, states, REAL[:1, :5], causal=False)
    other = states.clone()
    other[:, 3] += 1.0
    rows = [0, 1, 2, 4]
    close(by_definition(module, other, REAL[:1, :5], causal=False)[1][:, :, rows], factors[:, :, rows])
    with torch.no_grad():
        module.distances[0].fill_(-80.0)  # nothing before the query
    context = make_context(5, output_attentions=True)
    weights = run_layers([module], states, context)[0].weights
    assert weights.tril(-1).abs().max() < 1e-20 and weights.triu(1).abs().max() > 0.01


def config(**fields):
    block = {"type": "mask_attention_network", "max_distance": 4, **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "residual": "pre_ln", "block": block, **fields})


@torch.no_grad()
def test_order_of_sublayers_and_caches():
    """x + DMAN(n(x)), then attention, then the feed-forward; two caches, which grow, forget and are reordered."""
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(config(is_decoder=True)).double().eval())
    first = model.model.trunk.layers[0]
    assert [entry.name for entry in first.plan] == ["dynamic_mask", "attention", "feedforward"]
    ids, mask = pad([tokens(9, high=50), tokens(3, seed=1, high=50)], 9, "left")
    full = model(ids, attention_mask=mask).logits
    close(full[1, 6:], model(ids[1:, 6:]).logits[0])
    cache, found = None, []
    for begin, end in ((0, 1), (1, 5), (5, 6), (6, 9)):
        output = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    close(torch.cat(found, 1)[mask.bool()], full[mask.bool()])
    assert all(layer.parts["dynamic_mask"].keys.shape == layer.keys.shape == (2, 4, 9, 4) for layer in cache.layers)
    cache.crop(-2)
    again = model(ids[:, 7:], attention_mask=mask, past_key_values=cache).logits
    close(again[mask.bool()[:, 7:]], full[:, 7:][mask.bool()[:, 7:]])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.layers[0].parts["dynamic_mask"].keys.shape == cache.layers[0].keys.shape == (1, 4, 9, 4)
    last = tokens(1, 1, high=50)
    longer = torch.cat((ids[1:], last), 1)
    expected = model(longer, attention_mask=torch.cat((mask[1:], torch.ones(1, 1).long()), 1)).logits[:, -1]
    step = model(last, attention_mask=torch.cat((mask[1:], torch.ones(1, 1).long()), 1), past_key_values=cache)
    close(step.logits[:, -1], expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": {"max_distance": 0}}, "`max_distance` >= 1"),
        ({"attention": {"type": "dynamic_mask", "max_distance": 0}, "block": {"type": "vanilla"}}, "`max_distance`"),
        ({"position": "deberta"}, "has two"),
        ({"attention": "linear_transformer", "is_decoder": True}, "keys and values of a second attention"),
    ],
)
def test_refusals(fields, message):
    if fields.get("block") == {"type": "vanilla"}:
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**{**SIZES, **fields})
        return
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_other_caches_are_refused():
    from transformers import DynamicCache

    model = XFormerForCausalLM(config(is_decoder=True))
    with pytest.raises(ValueError, match="make_cache"):
        model(tokens(1, 3, high=50), past_key_values=DynamicCache(), use_cache=True)
