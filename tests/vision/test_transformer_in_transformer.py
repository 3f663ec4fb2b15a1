"""TNT: parity with timm by copied weights, and who sees whose pixels."""

import pytest
import torch

from hf_xformers.embedding.pixel_patch import PIXELS, PixelStates
from hf_xformers.variants import family
from tests.helpers import close, make_strong

FAMILY = family("transformer_in_transformer")
SIZES = {
    **{"image_size": 16, "patch_size": 8, "num_channels": 2, "hidden_size": 12, "num_attention_heads": 3},
    **{"num_hidden_layers": 2, "intermediate_size": 48, "num_labels": 5},
    "embedding": {"type": "pixel_patch", "inner_width": 8, "inner_stride": 4},
    "block": {"type": "transformer_in_transformer", "inner_heads": 2},
}


def build(head="ForImageClassification", **changes):
    cls = FAMILY[head]
    torch.manual_seed(0)
    return make_strong(cls(cls.config_class(**{**SIZES, **changes})).double().eval())


def images(count=2, seed=0, size=(16, 16)):
    return torch.randn(count, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def from_timm(theirs, ours):
    """timm's weights in our model."""
    state, width = theirs.state_dict(), ours.config.hidden_size
    embedding = ours.model.trunk.embedding
    names = {"pixel_embed.proj": embedding.tokens, "norm1_proj": embedding.pixel_norm, "proj": embedding.join}
    names |= {"norm2_proj": embedding.patch_norm, "norm": ours.model.trunk.final_norm, "head": ours.classifier}
    with torch.no_grad():
        embedding.class_token.copy_(state.pop("cls_token")[0, 0])
        embedding.positions.copy_(state.pop("patch_pos")[0])
        embedding.pixel_positions.copy_(state.pop("pixel_pos")[0])
        for number, layer in enumerate(ours.model.trunk.layers):
            inner = layer.pixels
            parts = {"norm_in": inner.attention_norm, "norm_mlp_in": inner.feedforward_norm, "proj": layer.join}
            parts |= {"norm1_proj": layer.pixel_norm, "norm2_proj": layer.patch_norm}
            parts |= {"norm_out": layer.attention_residual.norm, "norm_mlp": layer.feedforward_residual.norm}
            for name, holder in (("attn_in", inner), ("attn_out", layer.attention)):
                both = state.pop(f"blocks.{number}.{name}.qk.weight")
                for half, projection in zip(both.chunk(2), (holder.q_proj, holder.k_proj)):
                    projection.weight.copy_(half)
                parts |= {f"{name}.v": holder.v_proj, f"{name}.proj": holder.o_proj}
            for name, holder in (("mlp_in", inner), ("mlp", layer.feedforward)):
                parts |= {f"{name}.fc1": holder.up_proj, f"{name}.fc2": holder.down_proj}
            names |= {f"blocks.{number}.{name}": module for name, module in parts.items()}
        for name, module in names.items():
            for kind, parameter in module.named_parameters(recurse=False):
                parameter.copy_(state.pop(f"{name}.{kind}"))
    assert not state and width == theirs.embed_dim


def test_parity_with_timm():
    tnt = pytest.importorskip("timm.models.tnt", exc_type=ImportError)
    torch.manual_seed(3)
    theirs = tnt.TNT(
        img_size=16, patch_size=8, in_chans=2, num_classes=5, embed_dim=12, inner_dim=8, depth=2,
        num_heads_inner=2, num_heads_outer=3,
    )  # fmt: skip
    theirs, ours = make_strong(theirs.double().eval()), build()
    from_timm(theirs, ours)
    with torch.no_grad():
        close(ours(images()).logits, theirs(images()))


def test_the_preset_is_tnt_s():
    with torch.device("meta"):
        cls = FAMILY["ForImageClassification"]
        model = cls(cls.config_class(num_labels=1000))
    assert 23.5e6 < model.num_parameters() < 24.1e6  # 23.8 M, table 2


def pixels_and_patches(net, pixels):
    """States of pixels and patches before and after the first layer."""
    trunk = net.trunk
    embeds, further = trunk.embedding.read(pixels)
    context = trunk.make_context(embeds)
    context.inputs = further
    layer = trunk.layers[0]
    layer.prepare(context, None)
    out = layer(embeds, None, context.states, context=context, step=0)
    return embeds, further[PIXELS], out.hidden_states, out.states[PixelStates, None].states


def test_pixels_reach_other_patches_through_patches_alone():
    net, one = build("Model"), images(1)
    other = one.clone()
    other[:, :, 9, 3] += 1  # a pixel of patch 2, in the second row of patches
    (_, _, z, y), (_, _, other_z, other_y) = (pixels_and_patches(net, x) for x in (one, other))
    assert ((y - other_y).abs().amax((0, 2, 3)) > 0).tolist() == [False, False, True, False]
    assert ((z - other_z).abs().amax((0, 2)) > 0).all()


def test_the_class_token_gets_no_pixels():
    """Without the outer sublayers, patches alone change."""
    net = build("Model")
    layer = net.trunk.layers[0]
    with torch.no_grad():
        for linear in (layer.attention.o_proj, layer.feedforward.down_proj):
            linear.weight.zero_(), linear.bias.zero_()
    before, _, after, states = pixels_and_patches(net, images())
    close(after[:, 0], before[:, 0])
    told = layer.patch_norm(layer.join(layer.pixel_norm(states.flatten(2))))
    close(after[:, 1:], before[:, 1:] + told)


def test_other_sizes():
    net = build()
    with pytest.raises(ValueError, match="interpolate_pos_encoding"):
        net(images(size=(24, 16)))
    assert net(images(size=(24, 16)), interpolate_pos_encoding=True).logits.shape == (2, 5)
    with pytest.raises(ValueError, match="do not fill"):
        net(images(size=(18, 16)), interpolate_pos_encoding=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 4, "embedding": {"type": "pixel_patch", "inner_stride": 3}}, "does not divide"),
        ({"block": {"type": "transformer_in_transformer", "inner_heads": 3}}, "do not divide"),
        ({"block": "vanilla"}, "does not read"),
        ({"embedding": "patch"}, "pixel_patch"),
        ({"embedding": {"type": "pixel_patch", "inner_width": 0}}, "inner_width"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)
