"""Set Transformer: its blocks by torch's own multi-head attention, sets without an order, and pooling by attention."""

import pytest
import torch
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention

from hf_xformers import XFormerConfig, XFormerForSequenceClassification, XFSetTransformerConfig
from hf_xformers.attention.shared.multihead_block import MultiheadBlock, MultiheadPooling
from hf_xformers.configuration_image import XFormerImageConfig
from hf_xformers.modeling.image import XFormerForImageClassification
from hf_xformers.variants import family
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    check_compile,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    split_heads,
    vectors,
)
from tests.helpers import close, make_strong, tokens

D = WIDTH // HEADS
SPEC = {"type": "set_transformer", "num_inducing": 3}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def multihead(q_proj, k_proj, v_proj, o_proj):
    """torch's multi-head attention with these projections."""
    made = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double().eval()
    with torch.no_grad():
        made.in_proj_weight.copy_(torch.cat([q_proj.weight, k_proj.weight, v_proj.weight]))
        made.in_proj_bias.copy_(torch.cat([q_proj.bias, k_proj.bias, v_proj.bias]))
        made.out_proj.load_state_dict(o_proj.state_dict())
    return made


def attend(module, asking, read):
    return module(asking, read, read, average_attn_weights=False)


def block_by_hand(block, asking, read):
    """MAB(X, Y) of one text -> its output and weights."""
    found, weights = attend(multihead(block.q_proj, block.k_proj, block.v_proj, block.o_proj), asking, read)
    hidden = asking + found
    if block.norms is not None:
        hidden = block.norms[0](hidden)
    hidden = hidden + relu(block.up_proj(hidden))
    return hidden if block.norms is None else block.norms[1](hidden), weights


@torch.no_grad()
def by_hand(layer, states, mask=None):
    """One text at a time, on its real tokens alone -> outputs and weights."""
    outputs = layer.o_proj.bias.expand_as(states).clone()  # of a text without tokens
    weights = torch.zeros(*states.shape[:1], HEADS, *(states.shape[1],) * 2, dtype=states.dtype)
    outer = multihead(layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    for b in range(states.shape[0]):
        places = (torch.ones(states.shape[1]) if mask is None else mask[b]).nonzero()[:, 0]
        if len(places):
            text = states[b : b + 1, places]
            induced, packing = block_by_hand(layer.inducing_block, layer.inducing_points[None], text)
            found, reading = attend(outer, text, induced)
            outputs[b, places] = found[0]
            for h in range(HEADS):
                weights[b, h][places[:, None], places[None]] = reading[0, h] @ packing[0, h]
    return outputs, weights


@each_path
@pytest.mark.parametrize("norm", [True, False])
def test_equation(implementation, norm):
    (layer,) = build_layers({**SPEC, "inducing_norm": norm})
    for length, mask in ((6, None), (6, PADDING), (2, None)):
        states = vectors(4, length)
        real = torch.ones(4, length).bool() if mask is None else mask
        context = make_context(length, padding_mask=mask, implementation=implementation)
        (result,) = run_layers([layer], states, context)
        output, weights = by_hand(layer, states, mask)
        close(result.output[real].detach(), output[real])
        close(result.output[3].detach(), output[3])
        if implementation == "eager":
            rows = real[:, None, :, None]
            close((result.weights * rows).detach(), weights * rows)


def test_whole_block():
    """A layer with its norm behind the sum, identity projections around its feed-forward: ISAB as the paper has it."""
    fields = {**GEOMETRY, "num_hidden_layers": 1, "intermediate_size": WIDTH, "feedforward": "relu"}
    config = XFSetTransformerConfig(**{**fields, "attention": SPEC, "position": "none"})
    model = make_strong(family("xf_set_transformer")["Model"](config), amount=0.4).double().eval()
    layer = model.trunk.layers[0]
    outer = MultiheadBlock(config).double()
    with torch.no_grad():
        layer.feedforward.down_proj.weight.copy_(torch.eye(WIDTH))
        layer.feedforward.down_proj.bias.zero_()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(outer, name).load_state_dict(getattr(layer.attention, name).state_dict())
        outer.up_proj.load_state_dict(layer.feedforward.up_proj.state_dict())
        outer.norms[0].load_state_dict(layer.attention_residual.norm.state_dict())
        outer.norms[1].load_state_dict(layer.feedforward_residual.norm.state_dict())
        states = vectors(2, 5)
        points = layer.attention.inducing_points.expand(2, -1, -1)
        expected, _ = block_by_hand(outer, states, block_by_hand(layer.attention.inducing_block, points, states)[0])
        close(model(inputs_embeds=states).last_hidden_state, expected)


def test_sets():
    """Outputs follow the order of tokens, and a set that is given twice reads as it does once."""
    (layer,) = build_layers(SPEC)
    states, order = vectors(2, 7), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    with torch.no_grad():
        output = run_layers([layer], states, make_context(7))[0].output
        close(run_layers([layer], states[:, order], make_context(7))[0].output, output[:, order], 1e-12)
        twice = run_layers([layer], torch.cat([states, states], 1), make_context(14))[0].output
        close(twice, torch.cat([output, output], 1), 1e-12)


def test_tokens_for_inducing_points_are_dense_attention(monkeypatch):
    (layer,) = build_layers({**SPEC, "num_inducing": 6})
    monkeypatch.setattr(layer, "induce", lambda states, mask, literal: (states, None))
    states = vectors(2, 6)
    with torch.no_grad():
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        expected = layer.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        close(run_layers([layer], states, make_context(6))[0].output, expected, 1e-12)


def test_what_is_kept():
    (layer,) = build_layers({**SPEC, "num_inducing": 8})
    for length in (64, 256):
        sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length)))
        assert sizes[0] <= length * max(WIDTH, 8 * HEADS), sizes[:3]


# ------------------------------------------------------------------------------------------- pooling


@pytest.mark.parametrize("seeds", [1, 3])
def test_pooling(seeds):
    pooling = make_strong(MultiheadPooling(XFormerConfig(**GEOMETRY), seeds), amount=0.4).double().eval()
    with torch.no_grad():
        pooling.seeds.copy_(torch.randn(seeds, WIDTH))
        states = vectors(4, 6)
        for mask in (None, PADDING):
            found = pooling(states, mask)
            for b in range(3):
                text = states[b : b + 1] if mask is None else states[b : b + 1, mask[b]]
                vector, _ = block_by_hand(pooling.block, pooling.seeds[None], relu(pooling.up_proj(text)))
                if seeds > 1:
                    vector, _ = block_by_hand(pooling.among_seeds, vector, vector)
                close(found[b], vector[0].mean(0))
            assert found.isfinite().all()
        close(pooling(states[:, [3, 0, 5, 1, 2, 4]]), pooling(states), 1e-12)


@torch.no_grad()
def test_classifiers_pool_by_attention():
    """Of texts and of images; a classifier of sets does not know their order. A pooler comes before it."""
    fields = {**GEOMETRY, "attention": SPEC, "num_labels": 3}
    config = XFSetTransformerConfig(**fields, position="none")
    model = make_strong(family("xf_set_transformer")["ForSequenceClassification"](config)).double().eval()
    ids, order = tokens(2, 6, high=50), [3, 0, 5, 1, 2, 4]
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    logits = model(ids, attention_mask=mask).logits
    close(model(ids[:, order], attention_mask=mask[:, order]).logits, logits)
    close(model(ids[1:, 2:]).logits, logits[1:])
    states = model.model(ids, attention_mask=mask).last_hidden_state
    close(model.classifier(model.pooling(states, mask.bool())), logits)
    pooled = XFormerForSequenceClassification(XFormerConfig(**fields, classifier_pooling="attention", add_pooler=True))
    assert pooled.pooling is None
    sizes = {**GEOMETRY, "image_size": 4, "patch_size": 2, "num_labels": 3, "classifier_pooling": "attention"}
    sizes = {name: value for name, value in sizes.items() if name not in ("vocab_size", "max_position_embeddings")}
    images = XFormerForImageClassification(XFormerImageConfig(**sizes)).double().eval()
    pixels = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    patches = images.model(pixels).last_hidden_state[:, images.config.embedding.leading_tokens :]
    close(images(pixels).logits, images.classifier(images.pooling(patches)))


def test_refusals():
    with pytest.raises(ValueError, match="`num_inducing` >= 1, got 0"):
        XFormerConfig(**GEOMETRY, attention={**SPEC, "num_inducing": 0})
    with pytest.raises(ValueError, match="no causal form"):
        XFormerConfig(**GEOMETRY, attention=SPEC, is_decoder=True)
    with pytest.raises(ValueError, match="classifier_pooling='attention'.; leave out the transform and take 'mean'"):
        XFormerConfig(**GEOMETRY, stack="patience_exit", classifier_pooling="attention")


MIX = {"set": {"attention": SPEC, "residual": "pre_ln", "num_key_value_heads": 2}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", mixes(MIX, ("encoder",)), ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize("case", mixes({"set": {**MIX["set"], "num_hidden_layers": 1}}, ("encoder",)), ids=str)
def test_compile(case):
    check_compile(case)
