"""Modules of multi-token prediction that draft tokens: what they draft, that the text stays the decoder's own, and
that it takes fewer passes."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_xformers import XFormerForCausalLM, XFormerForMultiTokenPrediction, variants
from hf_xformers.modeling.module_drafts import ModuleDrafts
from tests.helpers import close, make_strong, tokens
from tests.objectives.test_multi_token_prediction import SIZES, build, one_layer

pytestmark = pytest.mark.skipif(not hasattr(GenerationConfig(), "use_mtp"), reason="transformers has no `use_mtp`")

WINDOW = {"type": "sliding_window", "window_size": 3, "sinks": 0}
each_attention = pytest.mark.parametrize(
    "fields", [{}, {"num_key_value_heads": 2}, {"attention": WINDOW}], ids=["dense", "grouped", "window"]
)
SIZE = 16


@torch.no_grad()
def drafted(model, text, count):
    """The same [1, N] with drafts, and their scores, from the whole text each time."""
    states, table, scores = model.model(text[:, :-1]).last_hidden_state, model.get_input_embeddings().weight, []
    for k, module in enumerate(model.mtp[:count], 1):
        states = one_layer(model, module, table[text[:, k:]], states)
        scores.append(states[:, -1] @ table.T)
        text = torch.cat((text, scores[-1].argmax(-1, keepdim=True)), 1)
    return text, torch.stack(scores, 1)


@each_attention
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("start", [1, 6])
@torch.no_grad()
def test_drafts_are_those_of_the_whole_text(fields, depth, start):
    """After rounds in which any number of drafts came true; states of the others, and two places of padding before the
    text, are not read."""
    model, text, draw = build(depth=depth, **fields), tokens(1, 24) % 50, random.Random(depth)
    drafts = ModuleDrafts(model, GenerationConfig(max_length=26, do_sample=False), LogitsProcessorList())
    padded, mask = torch.cat((text[:, :2], text), 1), (torch.arange(26) >= 2).long()[None]
    known, matches, junk = start + 1, 0, torch.full((1, 2, SIZE), 1e6, dtype=torch.float64)
    last = torch.cat((junk, model.model(text[:, :start]).last_hidden_state), 1)
    while (count := min(depth, 24 - known - 1)) > 0:
        given, outputs = {"attention_mask": mask[:, : known + 2]}, SimpleNamespace(hidden_states=(last,))
        found, scores = drafts.get_candidates(padded[:, : known + 2], given, outputs, n_last_matches=matches)
        expected, wanted = drafted(model, text[:, :known], count)
        assert torch.equal(found[:, 2:], expected)
        close(scores.double(), wanted, 1e-5)
        matches = draw.randint(0, count)
        known += matches + 1
        last = model.model(text[:, : known - 1]).last_hidden_state[:, -matches - 1 :]
        last = torch.cat((last, torch.full((1, count - matches, SIZE), torch.nan)), 1)


def passes(model, *inputs, **options):
    """The text, and how often the decoder ran."""
    seen = []
    handle = model.model.register_forward_hook(lambda *_: seen.append(None))
    found = model.generate(*inputs, max_new_tokens=20, **options)
    handle.remove()
    return found, len(seen)


@torch.no_grad()
def counting(depth, mistaken=None, **fields):
    """A model that writes t + 1 behind t, and whose modules know; that of one depth does not behind some tokens."""
    model = build(depth=depth, vocab_size=SIZE, tie_word_embeddings=False, **fields)
    for layer in (*model.model.trunk.layers, *(module.layer for module in model.mtp)):
        layer.attention.o_proj.weight.mul_(0.1)
        layer.feedforward.down_proj.weight.mul_(0.1)
    model.get_input_embeddings().weight.copy_(torch.eye(SIZE))
    model.lm_head.decoder.weight.copy_(torch.eye(SIZE).roll(1, 0))
    for number, module in enumerate(model.mtp):
        module.join_proj.weight.copy_(torch.eye(SIZE, 2 * SIZE))
        if number == mistaken:
            module.join_proj.weight[:, :9] = 0
    return model


@each_attention
@pytest.mark.parametrize("depth", [1, 3])
def test_right_modules_save_passes(fields, depth):
    """The prompt's pass gives a token, every other one as many more as there are modules; the text is the same, also
    where some drafts are wrong, and for samples that leave no choice."""
    model, ids = counting(depth, **fields), torch.tensor([[3, 4, 5]])
    plain, count = passes(model, ids, do_sample=False)
    assert plain[0].tolist() == [number % SIZE for number in range(3, 26)] and count == 20
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
        found, count = passes(model, ids, use_mtp=True, **options)
        assert torch.equal(found, plain) and count == 1 + -(-19 // (depth + 1))
    found, some = passes(counting(depth, mistaken=depth // 2, **fields), ids, use_mtp=True, do_sample=False)
    assert torch.equal(found, plain) and count < some < 20


@each_attention
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_any_modules_leave_the_text(fields, depth):
    """From ids, from vectors, with a limit of positions and an end; samples are of as many tokens, with all states."""
    model, options = build(depth=depth, vocab_size=8, **fields), {"max_new_tokens": 20, "do_sample": False}
    ids = tokens(1, 12) % 8
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, use_mtp=True, **options), plain)
    vectors = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=vectors, use_mtp=True, **options), plain[:, 12:])
    options["eos_token_id"] = int(plain[0, -3])
    ended = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, use_mtp=True, **options), ended)
    given = {"do_sample": True, "return_dict_in_generate": True, "output_hidden_states": True}
    sampled = model.generate(ids, use_mtp=True, max_new_tokens=20, **given)
    assert sampled.sequences.shape == (1, 32) and all(len(states) == 3 for states in sampled.hidden_states)


def test_drafting_out_of_a_file(tmp_path):
    """As before it was saved; a family has the same."""
    model, ids, options = counting(2), torch.tensor([[3, 4]]), {"use_mtp": True, "do_sample": False}
    model.save_pretrained(tmp_path)
    again = XFormerForMultiTokenPrediction.from_pretrained(tmp_path).double()
    (found, count), (expected, before) = (passes(one, ids, **options) for one in (again, model))
    assert torch.equal(found, expected) and count == before == 8
    family = variants.family("deepseek_moe")["ForMultiTokenPrediction"]
    experts = {"type": "deepseek_moe", "num_experts": 4, "topk": 2, "expert_size": 8, "shared_size": 8}
    fields = SIZES | {"feedforward": experts, "pretraining": {"multi_token_prediction": {"depth": 2}}}
    model = make_strong(family(family.config_class(**fields)).double().eval())
    assert torch.equal(passes(model, ids, **options)[0], passes(model, ids, do_sample=False)[0])


def test_refusals():
    """Without modules, with a state that cannot be rolled back, and for several texts, as transformers says."""
    options, ids = {"use_mtp": True, "max_new_tokens": 2}, tokens(1, 4) % 50
    with pytest.raises(ValueError, match="XFormerForCausalLM has no modules .* by its own class"):
        build(XFormerForCausalLM).generate(ids, **options)
    for attention in ("linear_transformer", WINDOW | {"sinks": 1}):
        with pytest.raises(ValueError, match="cannot check drafted tokens, .* and `use_mtp` out"):
            build(attention=attention).generate(ids, **options)
    with pytest.raises(ValueError, match="batch_size = 1"):
        build().generate(ids.expand(2, -1), **options)
