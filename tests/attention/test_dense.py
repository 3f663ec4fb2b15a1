"""Dense attention against the equation, written as loops over rows, heads and queries in float64."""

import math

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM
from hf_xformers.attention.shared.base import literal_softmax_attention
from hf_xformers.core.context import LayerContext
from hf_xformers.position.base import ScoreBias
from tests.helpers import close, make_strong, tokens

WIDTH, HEADS = 16, 4
GEOMETRY = dict(
    vocab_size=50,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    num_hidden_layers=1,
    intermediate_size=8,
    max_position_embeddings=32,
)


def build_attention(causal=False, cross=False, **fields):
    config = XFormerConfig(**GEOMETRY, is_decoder=causal, **fields)
    torch.manual_seed(0)
    spec = config.cross_attention if cross else config.attention
    module = spec.build(config, layer_idx=0, cross=cross).double().eval()
    return make_strong(module, amount=0.3)


def make_context(length, causal=False, **fields):
    index = torch.arange(length)
    given = dict(
        padding_mask=None, positions=index[None], query_index=index, key_index=index, causal=causal, fresh=True
    )
    return LayerContext(**{**given, **fields})


def run(module, hidden_states, context, memory=None, cache=None):
    module.prepare(context, cache)
    with torch.no_grad():
        return module(hidden_states, context, memory=memory, past_key_values=cache)


def by_hand(module, hidden_states, allowed, memory=None, bias=None):
    """softmax(scale * q k + bias) v, one query of one head of one row at a time. allowed(b, i, j): may i see j?"""
    memory = hidden_states if memory is None else memory
    heads, groups, width = module.num_heads, module.num_key_value_groups, module.head_dim
    scale = module.spec.scale if module.spec.scale is not None else 1 / math.sqrt(width)
    with torch.no_grad():
        q, k, v = module.q_proj(hidden_states), module.k_proj(memory), module.v_proj(memory)
        batch, length = hidden_states.shape[:2]
        mixed = torch.zeros(batch, length, heads * width, dtype=torch.float64)
        for b in range(batch):
            for h in range(heads):
                own, shared = slice(h * width, (h + 1) * width), slice(h // groups * width, (h // groups + 1) * width)
                for i in range(length):
                    seen = [j for j in range(memory.shape[1]) if allowed(b, i, j)]
                    if not seen:
                        continue
                    scores = [scale * float(q[b, i, own] @ k[b, j, shared]) for j in seen]
                    if bias is not None:
                        scores = [score + float(bias[h, i, j]) for score, j in zip(scores, seen)]
                    top = max(scores)
                    weights = [math.exp(score - top) for score in scores]
                    for weight, j in zip(weights, seen):
                        mixed[b, i, own] += weight / sum(weights) * v[b, j, shared]
        return module.o_proj(mixed)


def vectors(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)


PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1},
        {"head_dim": 6},
        {"attention": {"type": "dense", "scale": 0.7, "bias": False}},
    ],
    ids=["plain", "grouped", "multi_query", "free_width", "scale"],
)
def test_equation(implementation, causal, fields):
    """No padding, and right, left and complete padding."""
    module = build_attention(causal, **fields)
    states = vectors(4, 6)
    context = make_context(6, causal, implementation=implementation)
    close(run(module, states, context).output, by_hand(module, states, lambda b, i, j: j <= i or not causal))
    context = make_context(6, causal, implementation=implementation, padding_mask=PADDING)
    expected = by_hand(module, states, lambda b, i, j: bool(PADDING[b, j]) and (j <= i or not causal))
    close(run(module, states, context).output, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("groups", [{}, {"num_key_value_heads": 2}])
def test_cross_attention(implementation, groups):
    """Queries of one length, a padded memory of another; causal order plays no part."""
    config_fields = {"is_encoder_decoder": True, **groups}
    module = build_attention(cross=True, **config_fields)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    context = make_context(3, True, implementation=implementation)
    close(run(module, states, context, memory).output, by_hand(module, states, lambda b, i, j: True, memory))
    context = make_context(3, True, implementation=implementation, memory_padding_mask=PADDING)
    expected = by_hand(module, states, lambda b, i, j: bool(PADDING[b, j]), memory)
    close(run(module, states, context, memory).output, expected)


def test_empty_rows_are_zero():
    """A query that sees nothing gives the output bias alone, and no gradient flows through it: no NaN either."""
    for implementation in ("sdpa", "eager"):
        module = build_attention()
        states = vectors(4, 6).requires_grad_()
        context = make_context(6, implementation=implementation, padding_mask=PADDING)
        module.prepare(context, None)
        output = module(states, context).output
        assert torch.equal(output[3], module.o_proj.bias.expand(6, -1))
        (slope,) = torch.autograd.grad(output.sum(), states)
        assert slope.isfinite().all() and (slope[3] == 0).all() and (slope[0] != 0).any()


def test_literal_weights():
    """Rows sum to 1 over what is seen; nothing elsewhere; zero rows where nothing is seen."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(4, 2, 6, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = PADDING[:, None, None, :]
    output, weights = literal_softmax_attention(query, key, value, mask, None, 0.5)
    assert output.shape == (4, 6, 2, 3)
    close(weights.sum(-1), PADDING.any(-1)[:, None, None].expand(4, 2, 6).double())
    assert (weights[~mask.expand_as(weights)] == 0).all() and (output[3] == 0).all()


def test_score_bias_by_hand():
    module = build_attention(position={"type": "t5_relative_bias", "num_buckets": 8, "max_distance": 10})
    bias = torch.randn(HEADS, 6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    class Bias(ScoreBias):
        def block(self, query_index, key_index):
            return bias[:, query_index][:, :, key_index]

    states = vectors(4, 6)
    for implementation in ("sdpa", "eager"):
        for mask in (None, PADDING):
            context = make_context(6, implementation=implementation, padding_mask=mask)
            context.shared["score_bias"] = Bias()
            expected = by_hand(module, states, lambda b, i, j, m=mask: m is None or bool(m[b, j]), bias=bias)
            close(run(module, states, context).output, expected)


def test_explicit_mask():
    """A prepared [B, 1, T, S] mask, boolean or additive, says everything, causal order included."""
    allowed = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.5
    allowed[..., 2, :] = False
    additive = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    states = vectors(2, 6)
    for causal in (False, True):
        module = build_attention(causal)
        expected = by_hand(module, states, lambda b, i, j: bool(allowed[b, 0, i, j]))
        for mask in (allowed, additive):
            for implementation in ("sdpa", "eager"):
                context = make_context(6, causal, implementation=implementation, explicit_mask=mask)
                close(run(module, states, context).output, expected)


def test_explicit_mask_through_the_model():
    """The same [B, T] mask, expanded by the caller, gives the same logits."""
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(XFormerConfig(**GEOMETRY)).double().eval())
    ids = tokens(2, 6, high=50)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    order = torch.ones(6, 6, dtype=torch.bool).tril()
    expanded = order[None, None] & mask.bool()[:, None, None, :]
    expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    output = model(input_ids=ids, attention_mask=expanded, use_cache=False).logits
    close(output[mask.bool()], expected[mask.bool()])


def test_cache_by_hand():
    """Two pieces with a cache: the second piece's queries see the first piece's keys."""
    module = build_attention(True)
    states = vectors(2, 6)
    expected = by_hand(module, states, lambda b, i, j: j <= i)
    for first in (1, 4, 5):
        cache = DynamicCache()
        start = run(module, states[:, :first], make_context(first, True), cache=cache).output
        rest = dict(fresh=False, query_index=torch.arange(first, 6), key_index=torch.arange(6))
        end = run(module, states[:, first:], make_context(6 - first, True, **rest), cache=cache).output
        close(torch.cat([start, end], 1), expected)


def test_packed_documents():
    """Positions that restart keep documents apart, in encoders and decoders: each gives what it gives alone."""
    for model_class in (XFormerForMaskedLM, XFormerForCausalLM):
        for position in ("learned_absolute", "rotary", "t5_relative_bias"):
            torch.manual_seed(0)
            model = make_strong(model_class(XFormerConfig(**GEOMETRY, position=position)).double().eval())
            lengths = [[3, 1, 4], [2, 2, 4]]
            rows = [
                [tokens(length, seed=10 * row + n, high=50) for n, length in enumerate(parts)]
                for row, parts in enumerate(lengths)
            ]
            ids = torch.stack([torch.cat(parts) for parts in rows])
            positions = torch.stack([torch.cat([torch.arange(length) for length in parts]) for parts in lengths])
            for implementation in ("sdpa", "eager"):
                model.set_attn_implementation(implementation)
                with torch.no_grad():  # in a decoder with the cache that is made by default
                    packed = model(input_ids=ids, position_ids=positions).logits
                    for row, parts in enumerate(rows):
                        alone = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])
                        close(packed[row], alone)


def test_whole_rows_are_not_packed():
    """Positions that do not restart say nothing new."""
    torch.manual_seed(0)
    model = make_strong(XFormerForMaskedLM(XFormerConfig(**GEOMETRY)).double().eval())
    ids = tokens(2, 6, high=50)
    with torch.no_grad():
        close(model(input_ids=ids, position_ids=torch.arange(6)[None]).logits, model(input_ids=ids).logits)


def test_dropout_acts_on_weights():
    """With every weight dropped at rate p and rescaled, the mean over many draws is the plain output."""
    fields = {"attention_probs_dropout_prob": 0.5}
    module = build_attention(**fields).train()
    states = vectors(1, 6)
    for implementation in ("sdpa", "eager"):
        context = make_context(6, implementation=implementation)
        torch.manual_seed(0)
        draws = torch.stack([run(module, states, context).output for _ in range(400)])
        assert (draws[0] - draws[1]).abs().max() > 1e-3
        expected = run(module.eval(), states, context).output
        module.train()
        error = (draws.mean(0) - expected).abs()
        assert (error < 5 * draws.std(0) / 400**0.5 + 1e-12).all()


def test_names_of_projections():
    names = {name for name, _ in build_attention().named_parameters()}
    assert names == {f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")}
    unbiased = build_attention(attention={"type": "dense", "bias": False})
    assert {name for name, _ in unbiased.named_parameters()} == {f"{part}_proj.weight" for part in "qkvo"}


@pytest.mark.parametrize("name", ["dense", "talking_heads", "realformer"])
def test_bias_of_the_output_alone(name):
    """And the reverse: none there, where the others have one."""
    for others, output in ((False, True), (True, False)):
        module = build_attention(attention={"type": name, "bias": others, "output_bias": output})
        own = {part: getattr(module, f"{part}_proj").bias is not None for part in "qkvo"}
        assert own == {"q": others, "k": others, "v": others, "o": output}


def test_masks_that_do_not_fit_are_refused():
    torch.manual_seed(0)
    model = XFormerForCausalLM(XFormerConfig(**GEOMETRY)).eval()
    ids = tokens(2, 6, high=50)
    with pytest.raises(ValueError, match=r"attention_mask.*\[2, 6\].*\[3, 6\]"):
        model(input_ids=ids, attention_mask=torch.ones(3, 6))
    with pytest.raises(ValueError, match="covers 5 tokens, but 0 cached and 6 new tokens make 6"):
        model(input_ids=ids, attention_mask=torch.ones(2, 5))
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="covers 9 tokens, but 6 cached and 1 new"):
        model(input_ids=ids[:, :1], attention_mask=torch.ones(2, 9), past_key_values=cache)


def test_mask_of_the_new_tokens_alone():
    """With a cache, a mask of the new tokens' length says that what is cached was real."""
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(XFormerConfig(**GEOMETRY)).double().eval())
    ids = tokens(2, 6, high=50)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
        output = model(input_ids=ids[:, 4:], attention_mask=torch.ones(2, 2), past_key_values=cache).logits
        close(output, model(input_ids=ids).logits[:, 4:])


def test_memory_is_projected_once():
    """During generation the keys and values of the memory are computed in the first step only."""
    torch.manual_seed(0)
    model = make_strong(XFormerForSeq2SeqLM(XFormerConfig(**GEOMETRY)).double().eval())
    calls = []
    model.model.decoder.layers[0].cross_attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    model.generate(input_ids=tokens(2, 6, high=50), max_new_tokens=5, min_new_tokens=5)
    assert len(calls) == 1


@pytest.mark.parametrize("shape", ["decoder", "seq2seq"])
def test_static_cache(shape):
    """A cache with slots that are not written yet: unwritten slots are not read."""
    torch.manual_seed(0)
    model_class = XFormerForCausalLM if shape == "decoder" else XFormerForSeq2SeqLM
    more = {} if shape == "decoder" else {"num_decoder_layers": 2}
    model = make_strong(model_class(XFormerConfig(**GEOMETRY, **more)).double().eval())
    ids = tokens(2, 5, high=50)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(input_ids=ids, attention_mask=mask, **settings)
    output = model.generate(
        input_ids=ids, attention_mask=mask, cache_implementation="static", disable_compile=True, **settings
    )
    assert torch.equal(output, expected)
