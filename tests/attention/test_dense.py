"""Dense attention: masks that the caller prepared, and biases of single projections."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations import flash_attention as flash
from transformers.integrations import flex_attention as flex
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM, XFormerModel
from hf_xformers.attention import dense
from hf_xformers.core import call
from hf_xformers.ops.block_sparse import attention as block_sparse
from tests.attention.references.table import softmax_attention
from tests.attention.score_helpers import GEOMETRY, build_layers, make_context, run_layers, vectors
from tests.common.cases import CASES
from tests.helpers import close, make_strong, pad, tokens
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


@pytest.mark.parametrize("length", [64, 128])
def test_cudnn_is_left_out_where_it_gives_nan(length, monkeypatch):
    """Its backward pass, with any mask (tests/ops has other lengths)."""
    used, plain = [], dense.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(*inputs, **options):
        used.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*inputs, **options)

    model = XFormerModel(XFormerConfig(**GEOMETRY, position="none")).eval()
    mask = torch.ones(1, length, dtype=torch.long)
    mask[:, -1] = 0
    ids = tokens(1, length, high=40)
    monkeypatch.setattr(dense, "ALL_ATTENTION_FUNCTIONS", {"sdpa": watched})
    model(ids, attention_mask=mask)
    with pretend_cuda(monkeypatch):
        moved = on_gpu(model), OnGPU(ids), OnGPU(mask)
        moved[0](moved[1], attention_mask=moved[2])
        moved[0](moved[1])
    layers = len(used) // 3
    assert used == [True] * layers + [length != 64] * layers + [True] * layers
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_that_is_left_out_makes_no_pairs(causal, side, monkeypatch):
    """On a GPU FlexAttention, here its equation on the processor, hides it: nothing else is as large as a number for
    each pair of tokens."""
    length = 160

    def literal(query, key, value, pattern, places, scale, *, key_mask, **options):
        allowed = key_mask.inner[:, None, None].expand(-1, -1, length, -1)
        allowed = allowed.tril() if places.causal else allowed
        scores = (query.inner @ key.inner.mT * scale).masked_fill(~allowed, -torch.inf)
        return OnGPU(scores.softmax(-1).nan_to_num() @ value.inner), None

    config = XFormerConfig(**GEOMETRY, head_dim=16, position="none", unpad_inputs=True, is_decoder=causal)
    model, ids = make_strong(XFormerModel(config)).eval(), tokens(2, length, high=40)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, -90:] = 0
    mask = mask.flip(1) if side == "left" else mask
    real = mask.bool()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).last_hidden_state[real]
        monkeypatch.setattr(block_sparse, "flex_block_sparse", literal)
        with pretend_cuda(monkeypatch) as log:
            found = on_gpu(model)(OnGPU(ids), attention_mask=OnGPU(mask), use_cache=False).last_hidden_state.inner
            assert log.largest < length**2, "numbers of a tensor"
    close(found[real], expected, 2e-5)


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


def like_flash(query, key, value, mask, query_length, is_causal, softmax_scale=None, position_ids=None, **options):
    """What transformers' FlashAttention computes, [B, T, H, d], of a padding mask or of the documents of a row."""
    assert mask is None or mask.ndim == 2
    (rows, length, heads, _), slots = query.shape, key.shape[1]
    allowed = torch.ones(rows, 1, length, slots, dtype=torch.bool)
    allowed = allowed.tril(slots - length) if is_causal else allowed
    if mask is not None:
        allowed = allowed & mask[:, None, None]
    elif position_ids is not None and rows == 1:
        document = (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
        allowed = allowed & (document[:, :, None] == document[:, None, :])[:, None]
    key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("bthd,bshd->bhts", query, key) * softmax_scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhts,bshd->bthd", weights, value)


@pytest.fixture
def back_ends(monkeypatch):
    """FlashAttention by its equation, FlexAttention without a compiler, and a function of a user's own, which is told
    a number more."""
    monkeypatch.setattr(flash, "_flash_attention_forward", like_flash)
    options = ("score_mod", "block_mask", "enable_gqa", "scale")
    monkeypatch.setattr(
        flex,
        "compile_friendly_flex_attention",
        lambda *inputs, **given: flex_attention(*inputs, **{name: given[name] for name in options}),
    )
    make = masking_utils.create_block_mask
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **given: make(**{**given, "_compile": False}))
    told = []

    def own(*inputs, number=None, **options):
        told.append(number)
        return sdpa_attention_forward(*inputs, **options)

    AttentionInterface.register("own", own)
    AttentionMaskInterface.register("own", sdpa_mask)
    yield told
    torch._dynamo.reset()  # FlexAttention on a processor goes through it, and takes later sizes for dynamic ones
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping["own"]


def by(name, model):
    """The model with another back-end, whether or not the package behind it is there."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation_internal = name
    return model


BACK_ENDS = ("flash_attention_2", "flex_attention", "own")
FURTHER = {
    "rotation": {"position": "rotary", "num_key_value_heads": 2},
    "bias": {"position": "t5_relative_bias"},
}


@pytest.mark.parametrize("name", BACK_ENDS)
@pytest.mark.parametrize("fields", list(FURTHER))
@pytest.mark.parametrize("head", [XFormerForMaskedLM, XFormerForCausalLM, XFormerForSeq2SeqLM])
@torch.no_grad()
def test_back_ends_of_transformers(head, fields, name, back_ends):
    """The same outputs by each: of padding on either side, of pieces after a cache, and of documents in a row."""
    torch.manual_seed(0)
    model = make_strong(head(XFormerConfig(**{**GEOMETRY, **FURTHER[fields]})).double().eval())
    rows = [tokens(7, high=40), tokens(4, seed=1, high=40)]

    def outputs():
        found = []
        for side in ("left", "right"):
            ids, mask = pad(rows, 7, side)
            more = {"decoder_input_ids": rows[0].expand(2, -1)} if head is XFormerForSeq2SeqLM else {}
            logits = model(ids, attention_mask=mask, **more).logits
            found.append(logits if more else logits[mask.bool()])
        ids = rows[0][None]
        if head is XFormerForCausalLM:
            past = model(ids[:, :3], use_cache=True).past_key_values
            found.append(model(ids[:, 3:], past_key_values=past).logits)
        if head is not XFormerForSeq2SeqLM and fields == "rotation":
            places = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
            found += [model(x, position_ids=places.expand_as(x)).logits for x in (ids, ids.expand(2, -1))]
        return found

    expected = outputs()
    by(name, model)
    for one, other in zip(outputs(), expected, strict=True):
        close(one, other)
    if name == "own":
        assert back_ends
    if head is XFormerForCausalLM:
        ids, mask = pad(rows, 7, "left")
        settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask}
        written = [model.generate(ids, **settings, **more) for more in ({}, {"cache_implementation": "static"})]
        expected = by("sdpa", model).generate(ids, **settings)
        assert all(torch.equal(each, expected) for each in written)


def test_a_function_of_ones_own_is_told_more(back_ends):
    """Arguments of its own change nothing about who sees whom."""
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(XFormerConfig(**GEOMETRY)).double().eval())
    ids, mask = pad([tokens(7, high=40), tokens(4, seed=1, high=40)], 7, "left")
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("own")
    found = model(ids, attention_mask=mask, number=5).logits
    close(found[mask.bool()], expected[mask.bool()])
    assert back_ends == [5]


@pytest.mark.parametrize("registered", [True, False])
@torch.no_grad()
def test_a_function_of_ones_own_reads_parts_of_a_text(registered, back_ends, monkeypatch):
    """Where a stack makes calls for words and sentences, as it does torch's; of masks by another name it is told."""
    said = []
    monkeypatch.setattr(call.logger, "warning_once", said.append)
    if not registered:
        del AttentionMaskInterface._global_mapping["own"]
    case = next(case for case in CASES if str(case) == "xf_hi_transformer-encoder")
    model, (ids, mask) = case.build(), pad([tokens(7), tokens(4, seed=1)], 7, "right")
    expected = case.run(model, ids, mask)
    model.set_attn_implementation("own")
    close(case.run(model, ids, mask), expected)
    assert bool(back_ends) is registered and bool(said) is not registered
    AttentionMaskInterface.register("own", sdpa_mask)


@pytest.mark.parametrize("kind", ["bias", "ones"])
def test_prepared_masks_of_other_numbers_are_refused(kind):
    model = XFormerForCausalLM(XFormerConfig(**GEOMETRY)).eval()
    mask = -torch.rand(1, 1, 6, 6) if kind == "bias" else torch.ones(1, 1, 6, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="holds other numbers than 0 .*; give a boolean one"):
        model(tokens(1, 6, high=40), attention_mask=mask)
    block = XFormerForCausalLM(XFormerConfig(**GEOMETRY, block="cpe")).eval()
    with pytest.raises(ValueError, match="and a block that reads no neighbors by itself"):
        block(tokens(1, 6, high=40), attention_mask=mask)
