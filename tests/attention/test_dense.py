"""Dense attention against the equation, written as loops over rows, heads and queries in float64."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM
from tests.attention.references.table import softmax_attention
from tests.attention.score_helpers import GEOMETRY, PADDING, build_layers, make_context, run_layers, vectors
from tests.helpers import close, make_strong, tokens

GEOMETRY = {**GEOMETRY, "num_hidden_layers": 1}


def test_empty_rows_are_zero():
    """A query that sees nothing gives the output bias alone, and no gradient flows through it: no NaN either."""
    for implementation in ("sdpa", "eager"):
        (layer,), states = build_layers("dense"), vectors(4, 6).requires_grad_()
        context = make_context(6, implementation=implementation, padding_mask=PADDING)
        output = run_layers([layer], states, context)[0].output
        assert torch.equal(output[3], layer.o_proj.bias.expand(6, -1))
        (slope,) = torch.autograd.grad(output.sum(), states)
        assert slope.isfinite().all() and (slope[3] == 0).all() and (slope[0] != 0).any()


def test_explicit_mask():
    """A prepared [B, 1, T, S] mask, boolean or additive, says everything, causal order included."""
    allowed = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.5
    allowed[..., 2, :] = False
    additive = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    states = vectors(2, 6)
    for causal in (False, True):
        (layer,) = build_layers("dense", causal=causal)
        each = [softmax_attention(layer, states[b : b + 1], allowed=allowed[b, 0])[0] for b in range(2)]
        for mask in (allowed, additive):
            for implementation in ("sdpa", "eager"):
                context = make_context(6, causal, implementation=implementation, explicit_mask=mask)
                close(run_layers([layer], states, context)[0].output, torch.cat(each))


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


def test_names_of_projections():
    names = {name for name, _ in build_layers("dense")[0].named_parameters()}
    assert names == {f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")}
    (unbiased,) = build_layers({"type": "dense", "bias": False})
    assert {name for name, _ in unbiased.named_parameters()} == {f"{part}_proj.weight" for part in "qkvo"}


@pytest.mark.parametrize("name", ["dense", "talking_heads", "realformer"])
def test_bias_of_the_output_alone(name):
    """And the reverse: none there, where the others have one."""
    for others, output in ((False, True), (True, False)):
        (module,) = build_layers({"type": name, "bias": others, "output_bias": output})
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
