"""Set Transformer: its blocks by torch's own multi-head attention, sets without an order, and pooling by attention."""

import pytest
import torch
from torch.nn.functional import relu

from hf_xformers import XFormerConfig, XFormerForSequenceClassification, XFSetTransformerConfig
from hf_xformers.attention.shared.multihead_block import MultiheadBlock, MultiheadPooling
from hf_xformers.configuration_image import XFormerImageConfig
from hf_xformers.modeling.image import XFormerForImageClassification
from hf_xformers.variants import family
from tests.attention.references.compressed import multihead_block
from tests.attention.score_helpers import GEOMETRY, PADDING, WIDTH, vectors
from tests.helpers import close, make_strong, tokens

SPEC = {"type": "set_transformer", "num_inducing": 3}


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
        expected, _ = multihead_block(
            outer, states, multihead_block(layer.attention.inducing_block, points, states)[0]
        )
        close(model(inputs_embeds=states).last_hidden_state, expected)


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
                vector, _ = multihead_block(pooling.block, pooling.seeds[None], relu(pooling.up_proj(text)))
                if seeds > 1:
                    vector, _ = multihead_block(pooling.among_seeds, vector, vector)
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
