"""Random mixes: over all slots, all fields of their specs, shapes, heads, and overrides by layer and by tower."""

from __future__ import annotations

import dataclasses
import random
import typing
from dataclasses import dataclass
from typing import Any

from hf_xformers.core.components import SLOTS, names
from tests.helpers import NO_DROPOUT

HEADS = {
    "encoder": ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    "decoder": ("Model", "ForCausalLM", "ForCausalLM", "ForCausalLM", "ForSequenceClassification"),
    "seq2seq": ("Model", "ForSeq2SeqLM", "ForSeq2SeqLM", "ForSeq2SeqLM", "ForSequenceClassification"),
}
FLAGS = {
    "encoder": {"is_decoder": False, "is_encoder_decoder": False},
    "decoder": {"is_decoder": True, "is_encoder_decoder": False},
    "seq2seq": {"is_decoder": False, "is_encoder_decoder": True},
}
VOCAB, POSITIONS = 40, 24
GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 16,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **NO_DROPOUT,
}

# Values of fields whose type does not say them, or whose defaults are made for real models. A field that is named here
# is always drawn; `slot.type.field` comes before `type.field`, which comes before `field`.
SIZES = (1, 2, 3, 4, 5, 8)
LONG_ENOUGH = {"original_max_position_embeddings": POSITIONS}
# By length beyond what the checks' texts have: a longer text turns earlier tokens anew, in every layer below the first
# otherwise than a cache can know.
SCALINGS: tuple[Any, ...] = (
    None,
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    *({"type": "longrope", "short_factor": (1.0,) * n, "long_factor": (2.0,) * n, **LONG_ENOUGH} for n in (1, 2)),
    {"type": "llama3", "factor": 8, "original_max_position_embeddings": 16},
    {"type": "proportional", "proportion": 0.5},
    {"type": "linear", "factor": 0.5},
    "yarn",
)
ALWAYS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        "num_landmarks num_keys stride summary_width max_span ramp segment_length "
        "compressed_length reach clamp gate_size num_inducing memory_size compression_factor".split(),
        SIZES,
    ),
    **dict.fromkeys("chunk_size block_size chunk_length num_buckets".split(), (2, 4, 4, 8)),
    **dict.fromkeys("window_size attention_window".split(), (2, 4, 4, 6, (2, 4), 3)),
    **dict.fromkeys("num_random_blocks num_hashes num_global_blocks".split(), (1, 2)),
    **dict.fromkeys("num_experts".split(), (2, 4, 4, 3)),
    "factorized.width": (4, 8, 16),
    "adaptive.cutoffs": ((), (8,), (8, 20), (20, 8)),
    "adaptive.factor": (1, 2, 2, 0),
    "adaptive.width": (None, 8, 4),
    "feedback.window": (2, 4, 16, 1),
    "performer.num_features": (8, 16, 3),
    "arccos_attention.num_features": (8, 40, None, 3),
    "rfa.num_features": (4, 8, 1),
    "delta_net.num_features": (None, 4, 9),
    "luna.projected_length": SIZES,
    "poolingformer.window1": (1, 2, 3),
    "poolingformer.window2": (8, 12, 4),
    "memory_compressed_attention.layer_pattern": ("LM", "M", "M", "ML", "L", "X"),
    "clustered_attention.num_clusters": SIZES,
    "improved_clustered_attention.num_clusters": SIZES,
    "improved_clustered_attention.topk": (1, 2, 4, 32),
    "informer.sampling_factor": (1, 2, 5),
    "low_rank_band.low_rank": (1, 2, 4, 8),
    "low_rank_band.band_width": (0, 1, 3, 30, -1),
    "linformer.projected_length": (None, 1, 2, 4, 8),
    "moba.num_blocks": (1, 2, 3, 20),
    "native_sparse_attention.num_blocks": (3, 4, 20, 2),
    "multi_head_latent_attention.kv_lora_rank": (1, 5, 8, 0),
    "multi_head_latent_attention.q_lora_rank": (None, 1, 6),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (2, 4, 6, 3)),
    "nystromformer.conv_kernel_size": (None, 3, 5, 65),
    "global_tokens.num_global_tokens": (1, 2, 5),
    "global_attention.num_global_tokens": (1, 2),
    "sliding_window.window_size": (1, 2, 3, 4, 6, 16),
    "lolcats.window": (1, 2, 3, 4, 8, 16),
    "lolcats.gamma": (0.5, 0.25, 0.9),
    "lolcats.sinks": (0, 1, 4),
    "nystromformer.text_length": (None, None, 1, 4, 16, POSITIONS),
    "bigbird.dense_length": (0, 0, 4, 8, POSITIONS),
    "combined.parts": (
        ("learned_absolute", "t5_relative_bias"),
        ("sinusoidal_absolute", "rotary"),
        ("learned_absolute", {"type": "rotary", "local_theta": 100.0}),
        ("learned_absolute", "deberta"),
        ("sinusoidal_absolute", "alibi"),
        ("learned_absolute", "t5_bias_per_layer"),
        ("per_layer_position", "learnable_sinusoidal_relative"),
        ("learned_absolute", "shaw_relative"),
        ("floater", "tupe"),
        ("learned_absolute", "music_transformer"),
        ("sinusoidal_absolute", "gaussian_transformer"),
        ("sinusoidal_absolute", "learned_absolute"),
        ("rotary", "t5_relative_bias"),
        ("learned_absolute",),
        ("learned_absolute", "none"),
        (),
    ),
    "t5_relative_bias.num_buckets": (8, 4, 32),
    "t5_bias_per_layer.num_buckets": (8, 4, 32),
    "tupe.num_buckets": (8, 32, 4),
    "transient_global.num_buckets": (8, 32, 4),
    "transient_global.window_size": (1, 2, 4, 6, 16),
    "reformer.num_buckets": (None, 2, 4, (2, 2), (2, 4), 8),
    "routing_transformer.num_clusters": (1, 2, 4),
    "routing_transformer.window_size": (1, 2, 4, 8),
    "product_key_memory.num_keys": (8, 9, 8),
    "product_key_memory.topk": (8, 8, None),
    "all_attention.memory_size": (None, 1, 4, 8),
    "sinkhorn_transformer.sortcut_blocks": (None, None, 1, 2, 0),
    "iterations": (1, 3, 8),
    "temperature": (0.75, 0.2),
    "floater.delta": (0.25, 0.5),
    "sac.edges_per_node": (1, 2, 3, 30, 0),
    "sac.predictor_hidden": (4, 8),
    "sac.edge_distances": (1, 4, 64),
    "sac.candidate_window": (None, None, 1, 3, 30),
    "adaptively_sparse.alpha": (None, None, 1, 1.3, 1.5, 2, 0.5),
    "adaptively_sparse.alpha_min": (1.01, 1.3, 2.0),
    "floater.substeps": (1, 2),
    "hi_transformer.segment_length": (1, 3, 4, 5, 32),
    "max_sentences": (None, 24, 0),
    "axial_transformer.columns": (None, 1, 2, 3, 5, 12),
    "axial_transformer.num_outer_layers": (None, None, 2, 4, 3),
    **dict.fromkeys(("image_transformer.block_length", "image_transformer.memory_length"), SIZES),
    "image_transformer.image_size": (None, None, (4, 6), (2, 3)),
    "image_transformer.num_channels": (1, 2, 3),
    "image_transformer.block_shape": (None, None, (2, 2), (1, 3), (4, 5)),
    "image_transformer.memory_flange": (None, None, (2, 2), (0, 3), (1, 1)),
    "etc.local_radius": (1, 2, 4, 16),
    "bp_transformer.nodes_per_level": (1, 2, 4, 0),
    "bp_transformer.max_level": (0, 1, 3, 10),
    "etc.tokens_per_global": (1, 2, 4, 16),
    "etc_relative.max_distance": (0, 1, 2, 4),
    "etc_relative.relative_vocab_size": (12, 16, 8),
    "logistic_mixture.levels": (None, None, VOCAB, 30),
    "redraw_interval": (1000, 1, 2),
    # A memory shorter than the text reaches less far back by pieces than at once, by design.
    "memory_length": (None, 16, POSITIONS),
    "max_length": (None, 16, POSITIONS),  # longer than the texts
    "ca_mtl.num_tasks": (1,),  # of several, texts have to say theirs
    "ca_mtl.num_blocks": (None, 1, 2, 5, POSITIONS, 30),
    "collaborative_attention.shared_width": (None, 4, 8, 32, 5, 0),
    "lite_transformer.attn_channels": (None, None, 4, 12, 16),
    "lite_transformer.conv_heads": (None, 1, 2, 8, 3),
    "lite_transformer.kernel_sizes": (None, None, (3,), (1, 5), (31, 3), (4, 2), ()),
    "conformer.conv_kernel": (3, 1, 5, 4),
    "dynamic_mask.max_distance": (1, 2, 8, 30, 5, 0),
    "mask_attention_network.max_distance": (1, 2, 8, 30, 5, 0),
    "delight.min_depth": (2, 3, 2, 2, 1),
    "delight.max_depth": (3, 4, 5, 2),
    "delight.max_groups": (1, 2, 4, 3),
    "delight.proj_factor": (2, 2, 2, 1, 4),
    "evolved_transformer.encoder_kernels": ((3, 9), (3, 9), (1, 3), (5, 5), (3, 2)),
    "evolved_transformer.decoder_kernels": ((11, 7, 7), (2, 3, 1), (3, 7, 4), (7, 11, 1), (1, 1)),
    "evolved_transformer.wide_heads": (1, 4, 8, 16, 3),
    "separable_convolution.kernels": ((3, 5), (1, 7), (5, 3), (2, 4), (3,)),
    "dartsformer.operations": (
        (("attention", "ffn"),),
        (("conv_3", "dynamic_conv_7"), ("glu", "attention")),
        (("zero", "identity"),),
        (("attention", "ffn"), ("dynamic_conv_3", "attention")),
        (("attention", "attention", "glu", "conv_5"),),
        (("attention",),),
    ),
    "threshold": (-1, 0, 0.3, 0.5, 0.6, 0.65, (0.6,), (0.5, 0.1), ()),  # nats, of two classes: at most 0.69
    "patience": (None, 0, 1, 2),
    "vote_threshold": (None, 1, 1.5),
    "vote_lambda": (0.5, 0, 1),
    "min_layers": (1, 2),
    "exit_threshold": (0, 0.5, 0.9),
    "exit_window": (0, 1, 3),
    "diversity_weight": (0.1, 0),
}
SOMETIMES: dict[str, tuple[Any, ...]] = {
    "languages": ((), ("en", "de"), ("en", "en")),
    "id_tables": ((), (("task_ids", 3),), (("langs", 2), ("task_ids", 1)), (("langs", 0),), (("input_ids", 2),)),
    "scaling": SCALINGS,
    "local_scaling": SCALINGS,
    "local_theta": (None, 100.0, 10, 1),
    "angles": ("global", "local", "local", "none"),
    "score_cap": (None, 0.5, 2.0, 30, 0, -1.0),
    "linear.cap": (None, 0.5, 2.0, 30, 0),
    "deberta.terms": (("c2p",), ("p2c",), ("c2p", "p2c"), ("c2p", "p2c", "p2p"), (), ("p2x",)),
    "max_distance": (1, 2, 4, 20, None),
    "shaw_relative.max_distance": (1, 2, 4, 20),
    "dilation": (1, 2, (1, 2), ((1, 1, 2, 2), 1)),
    "attention_dilation": (1, 2, (1, 2), (1, (1, 1, 2, 2))),
    "delight.activation": ("silu", "gelu", "nothing"),
    "delight.scaling": ("block", "uniform"),
    "dartsformer.candidates": (None, None, ("attention", "glu", "conv_5"), ("zero",), ("nothing", "glu")),
    "cpe.layers": ((0,), (0, 1), (1,), (), (5,)),
    "grid_size": (None, (3, 4), (2, 2)),
    "hash_layers.layers": (None, (1,), (0, 1), (7,)),
    "hash_layers.multi_hash": (1, 1, 2, 4, 0),
    "localness.layers": (None, 1, 2, 7, 0),
    "hard_coded_gaussian.offsets": (None, (0,), (-1, 2), (0, -1, -2, -5), (1, 3), (0, 1, 2), (), (-20,)),
    "hard_coded_gaussian.std": (1.0, 0.5, 2, 4.0, 0),
    "predictive_attention.kernel": (1, 3, 5, 2, -1),
    "product_key_memory.layers": (None, (1,), (0, 1), (7,)),
    "block_sizes": (None, (1, 1), (2,), (1,), (1, 1, 1), ()),
    "block_repeats": (None, (1, 2), (2,), (2, 1)),
    "dynamic": ((), ("x2l",), ("m2l", "m2w"), ("x2l", "x2w", "m2l", "m2w"), ("y",)),
    "synthesizer.kind": (
        "dense",
        "random",
        "fixed_random",
        "factorized_dense",
        "factorized_random",
        "dense+dot",
        "random+dot",
        "dot",
    ),
    "activation": ("relu", "gelu", "silu", "nothing"),
    "inner": ("relu", "gelu", "swiglu", "nothing"),
    "rezero.init": (0.0, 0, 1, 0.5),
    "adaptive_span.dynamic": (False, True),
    "transformer_on_a_diet.kernel_size": (1, 2, 3, 4),
    "transformer_on_a_diet.d_base": (1, 2, 3, 0),
    "transformer_on_a_diet.first_window_size": (1, 2, 4, 24),
    "transformer_on_a_diet.window_size_multiplier": (1, 2, 3),
    "poolingformer.two_level_layers": (None, (0,), (0, 1), (), (5,)),
    "poolingformer.pool_kernel": (1, 2, 3, 5),
    "poolingformer.pool_stride": (1, 2, 3),
    "multi_scale_transformer.scales": ((1, 3, 0.25), (0, 2), (0.125, 0.5), (24,), (1, 0), (), (0.0,), (1.5, 2)),
    "multi_scale_transformer.heads_per_scale": (
        None,
        ((2, 2), (1, 3)),
        ((2, 1, 1), (0, 0, 4)),
        ((4,), (4,)),
        ((1, 1),),
    ),
    "fraction": (0.5, 1.0, 0.25, 0, 1.5),
    "passes": (1, 2, 3),
    "layers_per_step": (1, 2, 3),
    "universal.groups": (1, 2, 5),
    "universal.act_halting_bias_init": (1.0, 0, 2, -1),  # at 8 all tokens halt before the layers of later groups run
    "base": (100.0, 10000, 1),
    "theta": (100.0, 10000, 0),
    "dropout": (0.0,),
    "expert_dropout": (0.0, None),
    "weight_dropout": (0.0,),
    "seed": (0, 1),
    "hash_seed": (0, 1),
    "random_seed": (0, 1),
}
_DISAGREEMENT = "disagreement_regularization"
SOMETIMES |= {
    "recurrent_windows.window_size": (None, 1, 2, 3, 5, 10**9),
    "recurrent_windows.extract_layer": (None, 0, 1, 8),
    "recurrent_windows.insert_layer": (None, 0, 1, -1),
    "recurrent_windows.recurrence_layers": (1, 2, 0),
}
SOMETIMES |= {
    "losses": (
        (),
        (_DISAGREEMENT,),
        ({"type": _DISAGREEMENT, "of": ("subspace", "output")},),
        ({"type": _DISAGREEMENT, "of": ("position",)}, "attention_guidance"),
        ("attention_guidance",),
        ({"type": "attention_guidance", "next": 0, "first": 1, "constant_passes": 1, "total_passes": 2},),
        ({"type": "attention_guidance", "next": 1, "layers": (1,)},),
        (_DISAGREEMENT, _DISAGREEMENT),
        ("nothing",),
    ),
    "aggregation": (
        None,
        "capsule_heads",
        "routing_aggregation",
        {"type": "capsule_heads", "routing": "em", "layers": (1,)},
        {"type": "capsule_heads", "final_linear": False, "num_output_capsules": 2},
        {"type": "routing_aggregation", "routing": "em", "layers": "all", "iterations": 1},
        {"type": "routing_aggregation", "final_linear": True, "num_output_capsules": 5},
    ),
}
# Fields that are not drawn, and why.
UNDRAWN = {
    "eval_capacity_factor": "an expert's capacity is a part of the whole text's tokens, so later ones count by design",
    "decoder_capacity": "the same",
    "expert_capacity": "it counts the tokens of a call, so that token by token differs from a whole text by design",
    "reformer.sets": "in the released code's `chunk` padding changes results, as its spec says",
    "causal_form": "in the `paper`'s form later tokens move the borders of chunks, as the specs say",
    "cpe.grid_size": "texts of the checks are of several lengths, and an image has one",
    "funnel.upsample": "without it states have another length, which most heads refuse",
    "distilling.upsample": "the same",
    "nystromformer.pinv_init": "`global` starts the inverse by the largest norm of the whole batch",
    "admin.start": "`profile` takes the start from data, and says so when there were none",
}
NUMBERS = {int: (0, 1, 2, 3, 4, 8, -1), float: (0.0, 0.5, 1.0, 2.0, -1.0)}

# What other fields of a config may be, beside the geometry above.
FIELDS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, 2, 4, 3, 0),
    "head_dim": (4, 6, 5, 8, 1),
    "num_attention_heads": (1, 2, 4, 3, 8),
    "num_hidden_layers": (1, 2, 3, 4),
    "hidden_size": (12, 16, 17, 24),
    "intermediate_size": (8, 12, 17, 1),
    "type_vocab_size": (0, 2),
    "initializer": ("normal", "scaled_residual", "xavier", "small", "t5"),
    "layer_norm_eps": (1e-5, 1e-12),
    "tie_word_embeddings": (True, False),
    "unpad_inputs": (True, False),
    "chunk_size_feed_forward": (0, 2, 4),
    "attn_implementation": ("eager", "sdpa"),
    "classifier_pooling": ("auto", "first", "mean", "last", "late_mean", "attention"),
    "classifier_transform": ("none", "dense", "dense_norm"),
    "classifier_bias": (True, False),
    "add_pooler": (True, False),
    "num_decoder_layers": (1, 2, 3),
    "initializer_range": (0.02, 1.0),
    "dtype": ("float32", "bfloat16", "float32", "no_type"),
    "id2label": ({0: "no", 1: "yes"}, {0: "a", 1: "b", 2: "c"}, {"0": "a", "1": "b"}, {"first": "a"}),
}
# What single layers are given, beside slots: every kind of field, those that cannot differ among them.
LAYER_FIELDS: dict[str, tuple[Any, ...]] = {
    **{name: FIELDS[name] for name in FIELDS if name not in ("attn_implementation", "num_decoder_layers")},
    "vocab_size": (50,),
    "max_position_embeddings": (16, 48),
    "is_decoder": (True, False),
    "is_encoder_decoder": (True, False),
    "use_cache": (False,),
    "pad_token_id": (3,),
    "eos_token_id": (3,),
    "num_decoder_layers": (1,),
    "decoder": ({"attention": "dense"},),
    "per_layer_config": ({0: {"attention": "dense"}},),
    "hidden_dropout_prob": (0.0, 2.0),
    "attention_probs_dropout_prob": (0.0, "much"),
    "classifier_dropout": (0.0,),
    "initializer_factor": (2.0,),
    "pooler_activation": ("relu",),
    "classifier_activation": ("relu",),
    "problem_type": ("regression",),
    "head_width": (8,),
    "tower": ("trunk",),
    "output_attentions": (True,),
    "typo_field": (1,),
}
BAD_LAYERS: tuple[Any, ...] = (
    [{"attention": "dense"}],
    3,
    "first",
    {"first": {"attention": "dense"}},
    {-1: {"attention": "dense"}},
    {7: {"attention": "dense"}},
    {0: 5},
    {0: ["attention"]},
    {0.5: {"attention": "dense"}},
    {},
    {0: {}},
    {True: {"attention": "dense"}},
    {"0": {"attention": "dense"}, 0: {"feedforward": "relu"}},
)
BAD_DECODER: tuple[Any, ...] = (3, [1], {"stak": "plain"}, {"hidden_size": 8}, {}, {"position": 7}, {"decoder": {}})


@dataclass(frozen=True)
class Mix:
    """What was drawn: fields of `XFormerConfig`, the shape, and the class to build."""

    shape: str
    head: str
    fields: dict[str, Any]

    def line(self) -> str:
        """A line that builds it again."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.fields.items() if GEOMETRY.get(name) != value)
        return f"{self.shape} {self.head}: XFormerConfig({given})"


def draw(seed: int) -> Mix:
    """The mix of this seed."""
    return Drawing(random.Random(seed)).mix()


class Drawing:
    """One mix in the making."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def mix(self) -> Mix:
        shape = self.rng.choice(list(FLAGS))
        fields = {**GEOMETRY, **FLAGS[shape]}
        busy = self.rng.choice((0.1, 0.2, 0.2, 0.35, 0.6))
        for slot in SLOTS:
            if slot != "cross_attention" or shape == "seq2seq":
                often = 2.0 if slot in ("attention", "position", "stack") else 1.0
                if self.chance(min(often * busy, 0.9)):
                    fields[slot] = self.spec(slot)
        self._meet(fields)
        for name, values in FIELDS.items():
            if self.chance(0.06):
                fields[name] = self.rng.choice(values)
        if self.chance(0.18):
            fields["per_layer_config"] = self.layers(fields["num_hidden_layers"])
        if shape == "seq2seq" and self.chance(0.5):
            fields["decoder"] = self.decoder(fields["num_hidden_layers"])
        head = self.rng.choice(HEADS[shape])
        stack = fields.get("stack")
        if isinstance(stack, dict) and stack["type"].endswith("_exit") and self.chance(0.7):
            head = "ForSequenceClassification"  # the one whose texts leave early
        return Mix(shape, head, fields)

    def _meet(self, fields: dict[str, Any]) -> None:
        """Components that only work together are given to each other often, or they would never be seen at work."""
        needs = {
            ("stack", "funnel"): {"attention": "transformer_xl", "position": "none"},
            ("stack", "segment_recurrent"): {"attention": "transformer_xl", "position": "none"},
            ("stack", "compressive"): {"attention": "transformer_xl", "position": "none"},
            ("stack", "hi_transformer"): {"block": "hi_transformer"},
            ("block", "hi_transformer"): {"stack": "hi_transformer"},
            ("attention", "bp_transformer"): {"block": "bp_transformer"},
            ("block", "bp_transformer"): {"attention": "bp_transformer"},
            ("stack", "feedback"): {"attention": "feedback"},
            ("attention", "feedback"): {"stack": "feedback"},
            ("attention", "conditional"): {"feedforward": "conditional", "stack": "conditional_computation"},
            ("stack", "conditional_computation"): {"attention": "conditional", "feedforward": "conditional"},
            ("attention", "complex_order"): {
                "embedding": "complex_order",
                "feedforward": "complex_parts",
                "normalization": "complex_parts",
                "position": "none",
            },
            ("attention", "transformer_xl"): {"position": "none"},
            ("stack", "axial_transformer"): {"attention": "axial_transformer"},
            ("attention", "axial_transformer"): {"stack": "axial_transformer"},
            ("stack", "etc"): {"attention": "etc", "position": "etc_relative"},
            ("position", "etc_relative"): {"attention": "etc", "stack": "etc"},
            ("residual", "no_residual"): {"attention": "star_transformer", "block": "no_ffn"},
            ("stack", "reversible"): {"residual": "pre_ln"},
            ("block", "parallel"): {"residual": "pre_ln"},
            ("embedding", "factorized"): {"head": self.rng.choice(("factorized", "transform"))},
        }
        attention, position = fields.get("attention", {}), fields.get("position", {})
        if attention.get("angles") == "local" and position.get("type") != "combined" and self.chance(0.8):
            fields["position"] = {"local_theta": 100.0, **self.spec("position", "rotary")}
        head = fields.get("head", {})
        untied = head.get("type") == "logistic_mixture" or head.get("unpredicted")
        if untied and self.chance(0.8):
            fields["tie_word_embeddings"] = False
        for (slot, kind), wants in needs.items():
            held = fields.get(slot)
            if isinstance(held, dict) and held["type"] == kind and self.chance(0.8):
                for other, name in wants.items():
                    fields[other] = self.spec(other, name)
                return

    def spec(self, slot: str, name: str | None = None) -> dict[str, Any]:
        """A component of `slot`, with some of its fields."""
        name = name or self.rng.choice(names(slot))
        kind = SLOTS[slot].get(name)
        given: dict[str, Any] = {"type": name}
        for field in dataclasses.fields(kind):
            always = _of(ALWAYS, slot, name, field.name)
            sometimes = _of(SOMETIMES, slot, name, field.name)
            if field.name in UNDRAWN or f"{name}.{field.name}" in UNDRAWN:
                continue
            if always is not None:
                given[field.name] = self.rng.choice(always)
            elif self.chance(0.2):
                given[field.name] = self.rng.choice(sometimes or _values(field.type, field.default))
        return self._fit(given, kind)

    def _fit(self, given: dict[str, Any], kind: Any) -> dict[str, Any]:
        """Mostly without what every component of a kind refuses, or fields of all attention would leave few at
        work."""
        for field, able in (
            ("query_key_norm", "norm"),
            ("score_cap", "cap"),
            ("angles", "rotation"),
            ("losses", "parts"),
            ("aggregation", "parts"),
            ("output_gate", "parts"),
            ("learned_sinks", "sink"),
        ):
            if field in given and able not in kind.head_options | kind.acts and self.chance(0.9):
                del given[field]
        wanted = (
            (given.get("joint_type") is not None, {"segments": True}),
            (not given.get("gain", True), {"bias": False}),
            (given.get("text_length") is not None, {"num_landmarks": self.rng.choice((1, 2, 4))}),
        )
        for asked, wants in wanted:
            if asked and self.chance(0.8):
                given.update(wants)
        return given

    def layers(self, count: int) -> Any:
        if self.chance(0.12):
            return self.rng.choice(BAD_LAYERS)
        found: dict[Any, dict[str, Any]] = {}
        for layer in range(count):
            if self.chance(0.6):
                found[layer] = self.overrides(LAYER_FIELDS)
        return found

    def overrides(self, fields: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for _ in range(self.rng.choice((1, 1, 2))):
            if self.chance(0.65):
                slot = self.rng.choice([*SLOTS, "attention", "feedforward"])
                given[slot] = self.spec(slot)
            else:
                name = self.rng.choice(list(fields))
                given[name] = self.rng.choice(fields[name])
        return given

    def decoder(self, count: int) -> Any:
        if self.chance(0.08):
            return self.rng.choice(BAD_DECODER)
        given: dict[str, Any] = {}
        if self.chance(0.6):  # what most often cannot stand in a decoder
            given.update({"stack": "plain", "attention": "dense"})
        given.update(self.overrides(LAYER_FIELDS) if self.chance(0.7) else {})
        if self.chance(0.15):
            given["per_layer_config"] = self.layers(count)
        return given


def _of(table: dict[str, tuple[Any, ...]], slot: str, name: str, field: str) -> tuple[Any, ...] | None:
    for key in (f"{slot}.{name}.{field}", f"{name}.{field}", field):
        if key in table:
            return table[key]
    return None


def _values(kind: Any, default: Any) -> tuple[Any, ...]:
    """Values of a field of this type, valid and borderline ones."""
    if kind is bool:
        return (True, False)
    if kind in NUMBERS:
        return (default, *NUMBERS[kind])
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    found = [default]
    for part in typing.get_args(kind):
        if part is type(None):
            found.append(None)
        elif part in NUMBERS:
            found += NUMBERS[part]
        elif part is bool or typing.get_origin(part) is typing.Literal:
            found += _values(part, default)
    return tuple(found)
