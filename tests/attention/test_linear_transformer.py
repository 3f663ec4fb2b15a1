"""The Linear Transformer: the state of a memory, and projections that are folded into the sums."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers.attention import linear_transformer
from hf_xformers.ops.linear.attention import folded_sums
from tests.attention.score_helpers import HEADS, PADDING, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close

D = WIDTH // HEADS
SPEC = {"type": "linear_transformer", "chunk_size": 4}


def test_memory_becomes_a_state():
    """Keys and values of the memory are summed once; the cache holds the sums, whatever the memory's length."""
    (layer,) = build_layers(SPEC, cross=True, is_encoder_decoder=True)
    states = vectors(4, 3)
    for length in (6, 6):
        memory = vectors(4, length, seed=1)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        context = make_context(3, True, memory_padding_mask=PADDING)
        expected = run_layers([layer], states, context, memory)[0].output
        for read in (memory, torch.zeros_like(memory)):  # the second time it is not looked at
            close(run_layers([layer], states, context, read, cache)[0].output, expected)
        kept = cache.cross_attention_cache.layers[0]
        assert kept.keys.shape == (4, HEADS, D, D) and kept.values.shape == (4, HEADS, D, 1)
        cache.reorder_cache(torch.tensor([1, 0, 2, 3]))
        order = [1, 0, 2, 3]
        found = run_layers([layer], states[order], context, memory, cache)[0].output
        close(found, expected[order])


def folding_calls(monkeypatch):
    """Counts how often projections are folded into the sums."""
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return folded_sums(*arguments, **options)

    monkeypatch.setattr(linear_transformer, "folded_sums", counted)
    return calls


@pytest.mark.parametrize("fields", [{}, {"attention": {**SPEC, "bias": False, "eps": 0.5}}, {"head_dim": 3}], ids=str)
def test_long_texts_fold_projections(fields, monkeypatch):
    calls = folding_calls(monkeypatch)
    (layer,) = build_layers(fields.get("attention", SPEC), **{k: v for k, v in fields.items() if k != "attention"})
    length = WIDTH + 1
    states, mask = vectors(3, length), torch.ones(3, length).bool()
    mask[1, 5:], mask[2] = False, False
    for padding in (None, mask):
        (result,) = run_layers([layer], states, make_context(length, padding_mask=padding), residual=False)
        (literal,) = run_layers([layer], states, make_context(length, padding_mask=padding, implementation="eager"))
        close(result.output, literal.output)
    assert len(calls) == 2
    run_layers([layer], states[:, :WIDTH], make_context(WIDTH))
    assert len(calls) == 2  # in a short text it does not pay


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled_by_class(module):
    module.__class__ = Doubled


def doubled_by_hook(module):
    module.register_forward_hook(lambda module, given, result: 2 * result)


def doubled_before(module):
    module.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    module.bias.data *= 2


def doubled_by_offloading(module):
    own = module.forward
    module.forward = lambda x: 2 * own(x)


def doubled_by_parametrization(module):
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Flatten())
    doubled_by_hook(module)


@pytest.mark.parametrize("name", ["v_proj", "o_proj"])
@pytest.mark.parametrize(
    "change", [doubled_by_class, doubled_by_hook, doubled_before, doubled_by_offloading, doubled_by_parametrization]
)
def test_projections_that_are_more_than_a_weight_are_called(name, change, monkeypatch):
    """What doubles a projection's result is passed over by nobody; gradients are those of the folded form."""
    calls, found = folding_calls(monkeypatch), []
    states = vectors(2, WIDTH + 3)
    for changed in (False, True):
        (layer,) = build_layers(SPEC)
        module, given = getattr(layer, name), states.clone().requires_grad_()
        if changed:
            change(module)
        else:
            module.weight.data *= 2
            module.bias.data *= 2
        (result,) = run_layers([layer], given, make_context(WIDTH + 3))
        result.output.square().sum().backward()
        others = [layer.get_submodule(part).weight.grad for part in ("q_proj", "k_proj")]
        found.append((result.output.detach(), given.grad, *others))
    assert len(calls) == 1
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_half_precision_keeps_its_sums(monkeypatch):
    calls = folding_calls(monkeypatch)
    (layer,) = build_layers(SPEC)
    states = vectors(2, WIDTH + 3)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            run_layers([layer.float()], states.float(), make_context(WIDTH + 3))
        run_layers([layer.bfloat16()], states.bfloat16(), make_context(WIDTH + 3))
    assert not calls
