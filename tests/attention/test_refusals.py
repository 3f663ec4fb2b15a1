"""What configs refuse: one line a case. Fields that do not fit together, and components that do not."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.core.components import SLOTS, build_spec, names
from hf_xformers.variants.ca_mtl import XFCAMTLConfig
from hf_xformers.variants.sac import XFSACConfig
from hf_xformers.variants.star_transformer import XFStarTransformerConfig
from tests.attention.score_helpers import GEOMETRY, build_layers, make_context, run_layers, vectors

# fmt: off
# Attention, its settings, and a part of the message.
SETTINGS = [
    ("adaptively_sparse", {"alpha_min": 1.0}, "`alpha_min` from 1.001 to 2, got 1.0; an alpha of 1 has no derivative"),
    ("adaptively_sparse", {"alpha": 1.5, "share_alpha": True}, "learns none to share; leave `share_alpha` out"),
    ("average_attention", {"ffn_size": 4, "use_ffn": False}, "leave one of them out"),
    ("average_attention", {"scale": 0.5}, "no scores to scale"),
    ("bigbird", {"window_blocks": 4}, "`window_blocks` must be odd, got 4"),
    ("bigbird", {"dense_length": 8, "global_mode": "etc"}, r"`dense_length` \(8\) needs global_mode='itc'"),
    ("band_attention", {"window_size": (4, 4)}, "2 entries in `window_size` for 3 layers"),
    ("dilated_attention", {"dilation": (1, (1, 2), 1)}, "2 gaps for a layer of 4 heads"),
    ("ca_mtl", {"num_blocks": 25}, "`num_blocks` of at most 24, the positions, got 25"),
    ("collaborative_attention", {"shared_width": 6}, "divides `shared_width` 6 among 4 heads"),
    ("hard_coded_gaussian", {"scale": 0.5}, "no scores to scale"),
    ("hard_coded_gaussian", {"offsets": ()}, "at least one number"),
    ("hard_coded_gaussian", {"offsets": (0, 1, 2)}, "3 `offsets`.*must divide `num_attention_heads` 4"),
    ("hard_coded_gaussian", {"offsets": (20,), "renormalize": True}, "more than 12 times `std`"),
    ("linformer", {"losses": ("disagreement_regularization",)}, "does not hand out what its heads read"),
    ("band_attention", {"losses": ({"type": "disagreement_regularization", "of": ("subspace", "position",
      "output")},)},
     "would cost more than the mechanism itself"),
    ("linear_transformer", {"losses": ("attention_guidance",)}, "reads the weights of all pairs"),
    ("dense", {"losses": ({"type": "disagreement_regularization", "of": ("heads",)},)},
     "takes subspace, position, output"),
    ("dense", {"losses": ({"type": "attention_guidance", "same": 1, "next": 1, "previous": 1, "first": 2},)},
     "patterns for 5 heads of 4"),
    ("dense", {"losses": ({"type": "attention_guidance", "same": 1, "next": 1, "previous": 1, "first": 1,
      "total_passes": 5},)},
     "`total_passes` >= `constant_passes`"),
    ("dense", {"losses": ({"type": "attention_guidance", "same": 1, "next": 1, "previous": 1, "first": 1,
      "layers": (3,)},)},
     "from 0 to 2, those of the tower"),
    ("dense", {"losses": ("attention_guidance", "attention_guidance")}, "2 times; give each loss once"),
    ("dense", {"losses": ("guidance",)}, "Unknown loss on heads 'guidance'"),
    ("linformer", {"query_key_norm": "head"}, "cannot normalize them"),
    ("performer", {"score_cap": 3.0}, "attention 'performer' has no place for `score_cap`"),
    ("dense", {"score_cap": 0}, "needs `score_cap` > 0"),
    ("dense", {"angles": "local"}, "give a rotary position its"),
    ("image_transformer", {"image_size": (4, 3), "num_channels": 2, "local": "2d", "block_shape": (3, 2)},
     "do not fill a plane of 4 x 6"),
    ("image_transformer", {"num_channels": 2, "local": "2d", "memory_flange": (1, 2)},
     "of which a `memory_flange` of 1 x 2 is no multiple"),
    ("image_transformer", {"image_size": (2, 2), "num_channels": 2},
     "8 tokens with 2 channels, but `max_position_embeddings` is 24"),
    ("arccos_attention", {"kernel_eps": 0, "num_features": 16}, "nothing to read"),
    ("arccos_attention", {"kernel_eps": 0, "num_features": None}, "nothing to read"),
    ("arccos_attention", {"scale": 0.5}, "no scores to scale"),
    ("rfa", {"scale": 0.5}, "by its `tau`"),
    ("rfa", {"gate": True}, "`gate=False` in an encoder"),
    ("dpfp", {"nu": 8}, "`nu` of at most 7, the different shifts for heads of width 4, got 8"),
    ("dpfp", {"scale": 0.5}, "nothing to scale"),
    ("dpfp", {"update_rule": "delta", "sum_normalize": False}, "diverge"),
    ("dpfp", {"update_rule": "delta"}, "`update_rule='sum'` in an encoder"),
    ("lazyformer", {"block_sizes": (2, 2)}, "for 4 layers, but the tower has 3"),
    ("hedgehog", {"scale": 0}, "`scale` > 0, got 0"),
    ("linear_transformer", {"scale": 1.0}, "no scores to scale"),
    ("linformer", {"projected_length": 10, "max_length": 9}, "more, not fewer"),
    ("linformer", {"sharing": "headless"}, "sharing"),
    ("linformer", {"sharing": "key_value", "projection": "mean"},
     "has no parameters that `sharing` 'key_value' could"),
    ("localness", {"layers": 0}, "`layers` >= 1.*'dense'"),
    ("longformer", {"attention_window": 5}, "even `attention_window`.*got 5; use 6"),
    ("longformer", {"attention_window": (4, 4)}, "2 entries in `attention_window` for 3 layers"),
    ("low_rank_band", {"low_rank": 5}, "at most the head width 4, got 5"),
    ("luna", {"pack_heads": 3}, "divide `hidden_size` 16, got 3"),
    ("memory_compressed_attention", {"layer_pattern": "LX"},
     "letters L .local. and M .compressed., such as 'LM', got 'LX'"),
    ("memory_compressed_attention", {"layer_pattern": ""}, "letters L"),
    ("multi_scale_transformer", {"scales": ()}, "at least one of `scales`"),
    ("multi_scale_transformer", {"scales": (1, -1)}, "a scale of -1"),
    ("multi_scale_transformer", {"scales": (1.5,)}, "a scale of 1.5"),
    ("multi_scale_transformer", {"scales": (0.0,)}, "a scale of 0.0"),
    ("multi_scale_transformer", {"heads_per_scale": ((1, 1, 1, 1, 0),)},
     "1 entries in `heads_per_scale` for 3 layers"),
    ("multi_scale_transformer", {"heads_per_scale": ((1, 1, 1, 1, 1), (1, 1, 1, 1, 1), (1, 1, 1, 1, 1))},
     "4 heads of a layer as"),
    ("multi_scale_transformer", {"heads_per_scale": ((4,), (4,), (4,))}, "each of the 5 scales"),
    ("nystromformer", {"conv_kernel_size": 4}, "must be odd, got 4"),
    ("nystromformer", {"num_landmarks": 3, "text_length": 8},
     "`text_length` 8 must be a multiple of `num_landmarks` 3"),
    ("performer", {"scale": -1.0}, "`scale` > 0"),
    ("performer", {"regularized": True, "orthogonal": False}, "orthogonal rows only"),
    ("poolingformer", {"window1": 2, "window2": 1}, r"`window2` \(1\) must be at least `window1` \(2\)"),
    ("poolingformer", {"window1": 2, "pool_kernel": 3}, "`pool_stride` 4 above `pool_kernel` 3"),
    ("poolingformer", {"window1": 2, "two_level_layers": (3,)}, "`two_level_layers` from 0 to 2"),
    ("predictive_attention", {"kernel": 4}, "an odd `kernel`"),
    ("reformer", {"num_buckets": 5}, "even numbers"),
    ("reformer", {"num_buckets": (4, 3)}, "even numbers"),
    ("reformer", {"num_buckets": 0}, "even numbers"),
    ("dense", {"aggregation": {"type": "routing_aggregation", "num_output_capsules": 5}},
     "divides 16 numbers among 5 output capsules"),
    ("nystromformer", {"aggregation": "capsule_heads"}, "does not hand out"),
    ("dense", {"aggregation": {"type": "capsule_heads", "layers": (3,)}}, "from 0 to 2, those of the tower"),
    ("dense", {"aggregation": "concat"}, "Unknown aggregation of heads 'concat'"),
    ("linformer", {"output_gate": "head"}, "as `output_gate` 'head' needs"),
    ("longformer", {"learned_sinks": True}, "attention 'longformer' has no place for `learned_sinks`"),
    ("dense", {"output_gate": "token"}, "output_gate"),
    ("sparse_transformer", {"summary_width": 2, "num_verts": 3},
     "no room for 3 runs of 2 summary columns in a `stride` of 5"),
    ("synthesizer", {"kind": "sparse"}, "takes dot, dense, random"),
    ("synthesizer", {"kind": "dot"}, "use attention 'dense'"),
    ("synthesizer", {"kind": "random+random"}, "must name different kinds"),
    ("synthesizer", {"kind": "random+dense", "mixture": "sigmoid"}, "mixes dot and one other kind"),
    ("synthesizer", {"kind": "random+dense+dot", "mixture": "sigmoid"}, "mixes dot and one other kind"),
    ("synthesizer", {"factor": 5}, "`factor` that divides its 24 places, got 5"),
    ("talking_heads", {"num_key_heads": 3, "mix_scores": False},
     "3 as `num_key_heads` and 4 attention heads needs the mixing"),
    ("talking_heads", {"num_value_heads": 3, "mix_weights": False}, "3 as `num_value_heads`"),
    ("talking_heads", {"dynamic": ("x2k",)}, "needs x2l, m2l, x2w, m2w under `dynamic`"),
    ("talking_heads", {"dynamic": ("x2l",), "mix_scores": False}, "needs `mix_scores=True`"),
    ("transformer_xl", {"joint_type": 2}, "`joint_type` 2 needs `segments=True`"),
    ("transient_global", {"num_buckets": 5}, "even and at least 4, got 5"),
    ("transient_global", {"max_distance": 1}, "above a quarter of `num_buckets`"),
]
# Further fields of the config, and a part of the message.
COMPANY = [
    ({"attention": "adaptive_span", "per_layer_config": {0: {"attention": "dense"}}},
     "of layer 1 reads what layer 0 owns, which has 'dense'"),
    ({"attention": "adaptive_span", "position": "rotary", "stack": "segment_recurrent"},
     "no places for position 'rotary' to turn"),
    ({"attention": "adaptive_span", "stack": {"type": "compressive", "compression": "most_used"}},
     "'most_used' asks how much attention"),
    ({"block": "no_ffn"}, "no_ffn"),
    ({"attention": "axial_transformer", "is_decoder": True},
     "needs a stack that lets every token read all earlier rows"),
    ({"attention": {"type": "axial_transformer", "sum_axial": True}, "is_decoder": True},
     "reads rows before columns"),
    ({"num_hidden_layers": 2, "attention": "axial_transformer", "is_decoder": True, "stack": "axial_transformer"},
     "two outer layers and an inner one"),
    ({"is_decoder": True, "stack": "axial_transformer"}, "which attention 'dense' does not have"),
    ({"stack": {"type": "axial_transformer", "num_outer_layers": 3}}, "even `num_outer_layers` >= 2.*got 3"),
    ({"num_hidden_layers": 1, "attention": "axial_transformer"}, "rows and columns in layers of their own"),
    ({"num_attention_heads": 1, "attention": {"type": "axial_transformer", "sum_axial": True}}, "make it even"),
    ({"attention": "band_attention", "stack": {"type": "global_tokens", "num_global_tokens": 3}},
     "needs attention that takes global tokens, which 'band_attention'"),
    ({"attention": "bigbird", "stack": {"type": "global_tokens", "num_global_tokens": 3}},
     "needs attention that takes global tokens, which 'bigbird'"),
    ({"stack": {"type": "global_tokens", "num_global_tokens": 3}, "is_decoder": True}, "cannot stand in a decoder"),
    ({"attention": {"type": "block_local_attention", "blocks_after": 1}, "is_decoder": True}, "`blocks_after` 1"),
    ({"block": "bp_transformer"}, "block 'bp_transformer' takes spans along"),
    ({"attention": "bp_transformer"}, "set `block='bp_transformer'`"),
    ({"attention": "bp_transformer", "block": "bp_transformer", "stack": "reversible", "residual": "pre_ln"},
     "cannot pass on"),
    ({"num_key_value_heads": 2, "attention": "collaborative_attention"}, "cannot have 2 key/value heads"),
    ({"attention": "cross_layer_attention", "per_layer_config": {2: {"attention": "dense"}}, "num_hidden_layers": 4},
     "of layer 3 reads what layer 2 owns, which has 'dense'"),
    ({"attention": "cross_layer_attention", "per_layer_config": {1: {"num_key_value_heads": 2}}}, "have to be alike"),
    ({"attention": "cross_layer_attention", "distinct_layers": 1}, "a layer's place counts"),
    ({"is_decoder": True, "attention": {"type": "delta_net", "nu": 8}}, "7 different"),
    ({"attention": {"type": "gla", "angles": "global"}, "position": "rotary"}, "turned by places from the beginning"),
    ({"is_decoder": True, "attention": {"type": "gated_delta_net", "key_heads": 3, "value_heads": 4}},
     "3 heads of queries, 3 of keys and 4 of values"),
    ({"is_decoder": True, "position": "rotary",
      "attention": {"type": "gated_delta_net", "angles": "global", "num_householder": 2}}, "several keys to a token"),
    ({"is_decoder": True, "attention": {"type": "rwkv7", "conv": 4}}, "leave it at 0"),
    ({"is_decoder": True, "attention": "rwkv7", "num_key_value_heads": 2}, "a learning rate for every head of keys"),
    ({"is_decoder": True, "attention": "rwkv7", "per_layer_config": {0: {"attention": "gla"}}},
     "reads what layer 0 owns"),
    ({"is_decoder": True, "block": "rwkv7"}, "which attention 'dense' here has not"),
    ({"is_decoder": True, "attention": {"type": "hgrn2", "conv": 4}}, "leave it at 0"),
    ({"is_decoder": True, "attention": {"type": "mamba2", "part_scales": [1.0, 2.0]}}, "`part_scales` of 5 parts"),
    ({"is_decoder": True, "position": "rotary", "attention": {"type": "gla", "angles": "global", "key_width": 6}},
     "keys of width 6; set `angles='none'`"),
    ({"is_decoder": True, "attention": {"type": "retnet", "key_width": 5}}, "heads of queries have 5"),
    ({"is_decoder": True, "attention": {"type": "mamba2", "scale": 0.5}}, "mamba2 does not scale queries"),
    ({"is_decoder": True, "attention": {"type": "mamba2", "angles": "global"}}, "no queries and keys that a position"),
    ({"attention": "differential_attention", "num_key_value_heads": 1},
     "even number.*got `num_key_value_heads` 1"),
    ({"attention": {"type": "differential_attention", "output_gate": "head"}}, "`output_gate` 'head'"),
    ({"attention": "multi_head_latent_attention", "num_key_value_heads": 2},
     "one latent, got `num_key_value_heads` 2; leave that out"),
    ({"attention": {"type": "multi_head_latent_attention", "qk_rope_head_dim": 3}, "position": "rotary"},
     "head width 3 is 3; choose an even"),
    ({"attention": {"type": "multi_head_latent_attention", "query_key_norm": "head"}}, "cannot normalize them"),
    ({"attention": "band_attention", "stack": "etc"}, "needs attention that takes any number of global tokens"),
    ({"position": "etc_relative"}, "use stack='etc', or position 'shaw_relative'"),
    ({"position": {"type": "etc_relative", "relative_vocab_size": 27}},
     r"`relative_vocab_size` >= 2 \* max_distance \+ 4, got 12 and 27"),
    ({"is_decoder": True, "attention": {"type": "hard_coded_gaussian", "offsets": (1, 2)}},
     "all `offsets` .1, 2. are later ones"),
    ({"residual": "pre_ln", "is_encoder_decoder": True, "cross_attention": "hard_coded_gaussian"},
     "residual 'pre_ln' would have a norm without use"),
    ({"residual": "no_residual", "is_encoder_decoder": True, "cross_attention": "hard_coded_gaussian"},
     "residual 'no_residual' would drop the text so far"),
    ({"position": "shaw_relative", "attention": {"type": "dense", "losses": ("attention_guidance",)}},
     "position 'shaw_relative' with its terms"),
    ({"is_decoder": True, "attention": {"type": "dense", "losses": ({"type": "attention_guidance", "same": 1,
      "next": 1, "previous": 1,
     "first": 1},)}},
     "a decoder does not see"),
    ({"attention": {"type": "dense", "query_key_norm": "each_head"}, "normalization": "scale_norm"},
     "'each_head' of attention 'dense' asks for a gain for every head, which normalization 'scale_norm' has not"),
    ({"attention": {"type": "dense", "query_key_norm": "head"}, "normalization": "power_norm"},
     "normalization 'power_norm' cannot"),
    ({"position": "t5_relative_bias", "attention": {"type": "dense", "score_cap": 3.0}},
     "position 't5_relative_bias' has no place"),
    ({"head": {"type": "logistic_mixture", "num_mixtures": 3, "levels": 60}}, "`levels` 60, .* `vocab_size` 50"),
    ({"attention": {"type": "informer", "causal_form": "paper"}, "is_decoder": True},
     "cannot generate.*use_cache=False"),
    ({"cross_attention": {"type": "rfa", "gate": True}}, "in `cross_attention`"),
    ({"cross_attention": {"type": "dpfp", "update_rule": "delta"}}, "in `cross_attention`"),
    ({"attention": "lazyformer", "per_layer_config": {1: {"attention": "dense"}}},
     "'lazyformer' .* give all layers 'lazyformer'"),
    ({"cross_attention": "lazyformer", "residual": "pre_ln", "is_encoder_decoder": True},
     "residual 'pre_ln' would have a norm without use"),
    ({"is_decoder": True, "attention": {"type": "localness", "window": "layer"}},
     "later ones among them.*cannot stand in a decoder; use `window='query'`"),
    ({"attention": "luna", "num_key_value_heads": 2}, "does not group heads"),
    ({"attention": "luna", "head_dim": 8}, "leave `head_dim` unset"),
    ({"attention": {"type": "poolingformer", "window1": 2, "window2": 4, "pool_kernel": 3, "pool_stride": 2},
     "is_decoder": True},
     "no room for a pooled key of 3 tokens"),
    ({"attention": {"type": "poolingformer", "window1": 2, "share_projections": True}, "head_dim": 6},
     "leave `head_dim` out"),
    ({"attention": "predictive_attention", "per_layer_config": {1: {"num_attention_heads": 2}}},
     "shares tensors between layers"),
    ({"attention": "predictive_attention", "per_layer_config": {0: {"attention": "dense"}}},
     "reads what layer 0 owns"),
    ({"cross_attention": "predictive_attention", "is_encoder_decoder": True}, "the decoder's `attention` is 'dense'"),
    ({"attention": "realformer", "per_layer_config": {1: {"num_attention_heads": 2}}},
     "'realformer' shares tensors between layers.* layer 0 has .* and layer 1"),
    ({"num_key_value_heads": 1, "attention": "reformer"}, "shares queries and keys"),
    ({"is_decoder": True, "attention": {"type": "reformer", "chunks_after": 1}}, "chunks_after"),
    ({"is_decoder": True, "attention": {"type": "reformer", "sets": "chunk"}}, "causal_form='paper'"),
    ({"is_decoder": True, "attention": {"type": "reformer", "chunks_before": 0}}, "chunks_before"),
    ({"is_decoder": True, "attention": {"type": "reformer", "causal_form": "paper"}}, "use_cache=False"),
    ({"hidden_size": 18, "head_dim": 4, "attention": {"type": "dense", "aggregation": "routing_aggregation"}},
     "an equal part of `hidden_size` 18"),
    ({"num_attention_heads": 2, "attention": {"type": "routing_transformer", "num_routing_heads": 3}},
     "num_routing_heads"),
    ({"num_key_value_heads": 1, "attention": "routing_transformer"}, "key/value heads"),
    ({"attention": {"type": "routing_transformer", "rotates_routed": True}, "position": "none"},
     "position 'none' rotates nothing"),
    ({"is_decoder": True, "attention": {"type": "routing_transformer", "share_qk": False}}, "share_qk"),
    ({"is_decoder": True, "attention": {"type": "routing_transformer", "causal_form": "paper"}}, "use_cache=False"),
    ({"stack": "patience_exit", "classifier_pooling": "attention"},
     "classifier_pooling='attention'.; leave out the transform and take 'mean'"),
    ({"is_decoder": True, "attention": {"type": "sinkhorn_transformer", "sortcut_blocks": 2}},
     "sortcut_blocks=2 lets every token read the whole text"),
    ({"position": "t5_relative_bias", "attention": {"type": "dense", "learned_sinks": True}},
     "position 't5_relative_bias' has no place"),
    ({"is_decoder": True, "attention": "sliding_window", "position": {"type": "rotary", "scaling": {"type": "dynamic",
     "factor": 2.0}}},
     "generates from keys as they were turned"),
    ({"num_attention_heads": 1, "attention": {"type": "sparse_transformer", "factorization": "heads"}},
     "over heads, of which there is one"),
    ({"num_hidden_layers": 1, "attention": {"type": "sparse_transformer", "factorization": "layers"}},
     "over layers, of which there is one"),
    ({"position": "rotary", "attention": {"type": "synthesizer", "kind": "random"}},
     "rotates queries and keys, which synthesizer of kind 'random' lacks"),
    ({"attention": "talking_heads", "num_key_value_heads": 2}, "does not group heads"),
    ({"hidden_size": 6, "num_attention_heads": 2, "attention": "tener"}, "even width"),
    ({"num_attention_heads": 2, "attention": "tener", "head_dim": 4}, "key_projection"),
    ({"attention": "tener", "num_key_value_heads": 1}, "num_key_value_heads"),
    ({"embedding": {"type": "word_characters", "character_heads": 4}}, "twice the heads"),
    ({"is_decoder": True, "attention": {"type": "transformer_xl", "segments": True}},
     "use it in an encoder without memory"),
    ({"hidden_size": 15, "num_attention_heads": 3, "attention": "transformer_xl"}, "even `hidden_size`"),
    ({"attention": {"type": "transient_global", "num_buckets": 4}, "is_decoder": True},
     "a token reads the summary of its own block"),
    ({"per_layer_config": {1: {"attention": {"type": "transient_global", "window_size": 2, "block_size": 3,
      "num_buckets": 4,
     "max_distance": 3}}}},
     "layer 0"),
]
# fmt: on


# What a mechanism may lack, the fields that ask for it, and who lacks it; of a memory, who has it.
FORMS = [
    ("has no causal form", {"is_decoder": True}, """bigbird clustered_attention csalr etc improved_clustered_attention
     informer linformer memory_vector nystromformer set_transformer star_transformer transient_global"""),
    ("is causal only", {}, "average_attention delta_net feedback native_sparse_attention rwkv7"),
    ("rotates queries and keys, which attention", {"position": "rotary", "is_decoder": True}, """all_attention
     average_attention bp_transformer collaborative_attention complex_order feedback hard_coded_gaussian
     low_rank_band luna memory_compressed_attention reformer tener transformer_xl"""),
]  # fmt: skip
READERS = """adaptively_sparse arccos_attention collaborative_attention complex_order conditional dense
 differential_attention dpfp hard_coded_gaussian hedgehog lazyformer linear_transformer linformer
 localness low_rank_band luna memory_compressed_attention memory_vector performer predictive_attention
 realformer rfa t2r talking_heads"""


def refusing(message, slot, fields):
    """The mechanisms whose place in `slot` is refused with this message."""
    found = set()
    for name in names(slot):
        try:
            XFormerConfig(**{**GEOMETRY, **fields, slot: name})
        except ValueError as error:
            found |= {name} if message in str(error) else set()
    return found


@pytest.mark.parametrize(("message", "fields", "lacking"), FORMS)
def test_forms(message, fields, lacking):
    assert refusing(message, "attention", fields) == set(lacking.split())


def test_scales_that_are_refused_are_not_taken_over():
    """A model whose attention has one is swapped without a word about it."""
    for name in names("attention"):
        try:
            build_spec("attention", {"type": name, "scale": 0.5})
        except ValueError:
            assert "scale" in SLOTS["attention"].get(name).not_taken_over, name


def test_memories():
    refused = refusing("cannot read a memory as `cross_attention`", "cross_attention", {})
    assert set(names("attention")) - refused == set(READERS.split())


@pytest.mark.parametrize(("attention", "fields", "message"), SETTINGS)
def test_settings(attention, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        XFormerConfig(**GEOMETRY, attention={"type": attention, **fields})


@pytest.mark.parametrize(("fields", "message"), COMPANY)
def test_company(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        XFormerConfig(**{**GEOMETRY, **fields})


@pytest.mark.parametrize(("config", "fields", "message"), [
    (XFCAMTLConfig, {"attention": {"type": "ca_mtl", "num_tasks": 3, "num_blocks": 6}, "is_encoder_decoder": True,
                     "decoder": None}, "knows no task"),
    (XFCAMTLConfig, {"per_layer_config": {0: {"attention": "dense"}}}, "reads what layer 0 owns"),
    (XFSACConfig, {"stack": "reversible"}, "stack 'reversible'"),
    (XFStarTransformerConfig, {"is_decoder": True}, "no causal form .* its relay reads the whole text"),
    (XFStarTransformerConfig, {"per_layer_config": {1: {"attention": "dense"}}}, "a memory through all layers"),
    (XFStarTransformerConfig, {"block": "parallel"}, "does more than add to it"),
])  # fmt: skip
def test_families(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config(**{**GEOMETRY, **fields})


@pytest.mark.parametrize(("spec", "message"), [
    ({"type": "luna", "projected_length": 4}, "was handed no memory"),
    ({"type": "linformer", "sharing": "layerwise", "projected_length": 3, "max_length": 9}, "handed no projection"),
])  # fmt: skip
def test_layers_without_the_first(spec, message):
    with pytest.raises(ValueError, match=message):
        run_layers(build_layers(spec, 2)[1:], vectors(1, 3), make_context(3))


@pytest.mark.parametrize(("spec", "message"), [
    ("linear_transformer", "make_cache"),
    ("predictive_attention", "keeps rows of scores.*DynamicCache has no place for"),
    ({"type": "routing_transformer", "rotates_routed": True}, "the clusters of keys, which DynamicCache does not"),
])  # fmt: skip
def test_caches_without_a_place(spec, message):
    layers = build_layers(spec, 3, True, position="none" if isinstance(spec, str) else "rotary")
    with pytest.raises(ValueError, match=message):
        run_layers(layers, vectors(1, 3), make_context(3, True), cache=DynamicCache())


@pytest.mark.parametrize("spec", [
    {"type": "reformer", "chunk_length": 4}, {"type": "routing_transformer", "num_clusters": 3},
], ids=lambda spec: spec["type"])  # fmt: skip
def test_the_papers_form_does_not_generate(spec):
    config = XFormerConfig(**GEOMETRY, is_decoder=True, use_cache=False, attention={**spec, "causal_form": "paper"})
    net, ids = XFormerForCausalLM(config), torch.randint(5, 40, (2, 9))
    net(ids, labels=ids).loss.backward()
    for use_cache in (True, False):
        with pytest.raises(ValueError, match="cannot generate"):
            net.generate(ids, max_new_tokens=2, use_cache=use_cache)
    with pytest.raises(ValueError, match="cannot generate"):
        net(ids, use_cache=True)
