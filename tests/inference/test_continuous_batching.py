"""Continuous batching (`generate_batch`): each text is what `generate` makes of it alone, in any company, or the model
is refused before anything runs."""

import functools
import gc
import itertools

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.core.paging import why_not_paged
from tests.common.cases import CASES, components, covering
from tests.helpers import make_strong, tokens

DECODERS = [case for case in CASES if case.causal and case.shape == "decoder"]
PAGED = [case for case in DECODERS if not why_not_paged(case.preset)]
# Texts of several lengths, longer ones than a step takes at once, with a beginning that three of them share.
START = tokens(9, seed=3).tolist()
PROMPTS = [START + [7], tokens(2, seed=1).tolist(), START + [11, 12], [5], tokens(14, seed=2).tolist(), START[:]]
NEW = 6


@pytest.fixture(autouse=True)
def quick_collection():
    """Each manager ends with two collections of garbage, which would look through all that other tests have made."""
    gc.freeze()
    yield
    gc.unfreeze()


def settings():
    """No end of a text, so that all have the same length; `generate_batch` writes into it."""
    return GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=[10**6], pad_token_id=0)


def alone(model, prompts=PROMPTS):
    found = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), generation_config=settings())
        found.append(ids[0, len(prompt) :].tolist())
    return found


def together(model, prompts=PROMPTS, **changes):
    """Pages of four tokens, and twelve tokens in a step: prompts are read in parts, beside others' next tokens."""
    pages = {"page_size": 4, "num_blocks": 40, "max_batch_tokens": 12, **changes}
    found = model.generate_batch(
        prompts, generation_config=settings(), continuous_batching_config=ContinuousBatchingConfig(**pages)
    )
    results = list(found.values())
    assert [result.prompt_ids for result in results] == prompts and not any(result.error for result in results)
    return [result.generated_tokens for result in results]


@functools.cache
def kinds(case):
    """What is not the same in every decoder: components, mixes, and shapes of heads."""
    config = case.config()
    parts = {part[:2] for part in components(case) if part[0] in ("attention", "position", "block", "feedforward")}
    grouped = {"grouped"} if config.key_value_heads < config.num_attention_heads else set()
    return parts | grouped | ({"sinks"} if config.attention.learned_sinks else set())


@pytest.mark.parametrize("case", covering(PAGED, kinds), ids=str)
def test_equals_generate(case):
    """Also with the literal equation, and the model is as it was afterwards."""
    model = case.build()
    expected = alone(model)
    assert together(model) == expected
    model.set_attn_implementation("eager")
    assert together(model) == expected
    assert model.config._attn_implementation == "eager"


def gpt2():
    return next(case for case in PAGED if case.name == "xf_gpt2")


def test_any_order_of_arrival():
    model = gpt2().shared()
    expected = dict(zip(map(tuple, PROMPTS), alone(model)))
    orders = list(itertools.permutations(range(len(PROMPTS))))[::180]
    for order in orders:
        prompts = [PROMPTS[index] for index in order]
        assert together(model, prompts) == [expected[tuple(prompt)] for prompt in prompts]


@pytest.mark.parametrize("shared", [True, False])
def test_shared_beginnings(shared, monkeypatch):
    """Whether texts share the pages of equal beginnings or not; what is free at the end are all of them."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    model, taken, caches = gpt2().shared(), [], []
    search, reset = PagedAttentionCache.search_prefix_match, PagedAttentionCache.__init__

    def watched(self, *given):
        taken.append(search(self, *given))
        return taken[-1]

    def kept(self, *args, **kwargs):
        reset(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", watched)
    monkeypatch.setattr(PagedAttentionCache, "__init__", kept)
    assert together(model, allow_block_sharing=shared) == alone(model)
    assert (max(taken, default=0) == 8) == shared, "two full pages of a beginning of nine tokens"
    caches[0].evict_cached_blocks()  # what texts to come might share
    assert caches[0].compute_free_capacity() == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"position": "alibi"},
        {"position": {"type": "t5_relative_bias", "num_buckets": 8, "max_distance": 12}, "num_key_value_heads": 2},
        {"position": "rotary", "attention": {"type": "dense", "score_cap": 2.0, "learned_sinks": True}},
        {"position": "rotary", "attention": {"type": "dense", "output_gate": "head", "query_key_norm": "head"}},
        {"position": "sinusoidal_absolute", "num_hidden_layers": 4, "distinct_layers": 2},
    ],
    ids=["alibi", "t5_bias", "cap_and_sinks", "gate_and_norms", "shared_layers"],
)
def test_what_scores_have(fields):
    """Biases count places in a text, not slots of a row; caps and sinks need the literal scores."""
    size = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    model = XFormerForCausalLM(XFormerConfig(**{**size, "num_hidden_layers": 2, **fields}))
    model = make_strong(model.double().eval(), amount=0.3)
    prompts = [[token % 35 + 5 for token in prompt] for prompt in PROMPTS]
    assert together(model, prompts) == alone(model, prompts)
    model.set_attn_implementation("eager")
    assert together(model, prompts) == alone(model, prompts)


@functools.cache
def refused_kinds(case):
    return frozenset({why_not_paged(case.preset).partition(" ")[0]})  # an attention, a block, a stack ...


REFUSED = [case for case in CASES if case.causal and case not in PAGED]


def test_refusals(monkeypatch):
    """Before a thread or a page is there, with the component that stands against it."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    monkeypatch.setattr(ContinuousBatchingManager, "__init__", lambda *args, **kwargs: pytest.fail("it was begun"))
    for case in covering(REFUSED, refused_kinds):
        with pytest.raises(ValueError, match=r"Continuous batching keeps keys and values .*; use `generate`\."):
            together(case.shared())
    for name, part in (
        ("xf_performer", "attention 'performer' does not allow: its state is not keys and values"),
        ("xf_longformer", "attention 'longformer' does not allow"),
        ("xf_cpe", "block 'cpe' does not allow"),
        ("xf_transformer_xl", "stack 'segment_recurrent' does not allow"),
        ("xf_t5", "cannot do: an encoder-decoder keeps a memory for each text"),
    ):
        with pytest.raises(ValueError, match=part):
            together(next(case for case in REFUSED if case.name == name).shared())
    model = gpt2().build()
    with pytest.raises(ValueError, match="may have 200 tokens here, but position 'learned_absolute' .* covers"):
        together(model, [tokens(200 - NEW).tolist()])
    with pytest.raises(ValueError, match="Prompt 1 has no tokens; give at least one"):
        together(model, [[5], []])
    with pytest.raises(ValueError, match="`num_beams=3` has no meaning there; set it to 1, or use `generate`"):
        model.generate_batch([[5]], generation_config=GenerationConfig(num_beams=3, max_new_tokens=2, pad_token_id=0))
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="'flex_attention' does not read; call `set_attn_implementation"):
        together(model)
