"""Dense attention: masks that the caller prepared, and biases of single projections."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from hf_xformers.attention import dense
from tests.attention.references.table import softmax_attention
from tests.attention.score_helpers import GEOMETRY, build_layers, make_context, run_layers, vectors
from tests.helpers import close, make_strong, tokens
from tests.pretend_cuda import OnGPU, on_gpu, pretend_cuda

GEOMETRY = {**GEOMETRY, "num_hidden_layers": 1}


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


@pytest.mark.parametrize("position", ["none", "t5_relative_bias"])
def test_queries_that_see_nothing_are_open_to_the_kernels_of_an_accelerator(position, monkeypatch):
    """In half precision their gradients would be what stood in memory; outputs are those of a processor."""
    masks, plain = [], dense.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(module, query, key, value, mask, **options):
        masks.append(mask)
        return plain(module, query, key, value, mask, **options)

    config = XFormerConfig(**{**GEOMETRY, "position": position}, is_decoder=True)
    model, ids = make_strong(XFormerModel(config)).eval(), tokens(2, 9, high=40)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    monkeypatch.setattr(dense, "ALL_ATTENTION_FUNCTIONS", {"sdpa": watched})
    with pretend_cuda(monkeypatch):
        found = on_gpu(model)(OnGPU(ids), attention_mask=OnGPU(mask), use_cache=False).last_hidden_state.inner
    close(found, expected, 2e-5)
    assert masks and all(each.inner.any(-1).all() for each in masks)
