"""What configs refuse of positions, in one sentence: a line for each."""

from tests.refused import refusals

LONG = {"original_max_position_embeddings": 8}
GROWING = {"type": "dynamic", "factor": 4.0}
REFUSED = [
    # axial
    (
        "to a width of 16",
        dict(
            hidden_size=16, num_attention_heads=2, position={"type": "axial", "shape": (2, 3, 4), "widths": (3, 8, 4)}
        ),
    ),
    ("2 `widths`.*3 axes", dict(position={"type": "axial", "shape": (2, 3, 4), "widths": (8, 8)})),
    ("leave out `widths`", dict(position={"type": "axial", "combine": "sum", "widths": (16, 16, 16)})),
    # combined
    ("two `parts` at least.* got 'rotary'", dict(position={"type": "combined", "parts": ("rotary",)})),
    ("got none", dict(position={"type": "combined", "parts": ()})),
    ("a position that does something.* got 'rotary", dict(position={"type": "combined", "parts": ("rotary", "none")})),
    (
        "not 'combined' again",
        dict(
            position={
                "type": "combined",
                "parts": ("learned_absolute", {"type": "combined", "parts": ("learned_absolute", "rotary")}),
            }
        ),
    ),
    ("one part at most that acts", dict(position={"type": "combined", "parts": ("rotary", "t5_relative_bias")})),
    ("Unknown position component", dict(position={"type": "combined", "parts": ("learned_absolute", "nothing")})),
    (
        "must be even and at least 4, got 5",
        dict(
            position={
                "type": "combined",
                "parts": ("learned_absolute", {"type": "t5_relative_bias", "num_buckets": 5}),
            }
        ),
    ),
    (
        "which stack 'plain' does not",
        dict(position={"type": "combined", "parts": ("learned_absolute", "etc_relative")}),
    ),
    (
        "only works in a causal decoder",
        dict(position={"type": "combined", "parts": ("learned_absolute", "music_transformer")}),
    ),
    # complex_order
    ("tie_word_embeddings=False", dict(embedding="complex_order")),
    ("no token types", dict(embedding="complex_order", tie_word_embeddings=False, type_vocab_size=2)),
    ("dense feed-forward", dict(feedforward={"type": "complex_parts", "inner": "complex_parts"})),
    ("position 'none'", dict(embedding="complex_order", position="rotary", tie_word_embeddings=False)),
    # floater
    ("leave `head_dim`", dict(position="floater", num_key_value_heads=2)),
    ("adds to the queries, keys and values", dict(position="floater", attention="linear_transformer")),
    # forget_gate
    ("only works in a causal decoder", dict(position="forget_gate")),
    *[
        (why, dict(position="forget_gate", attention=attention, is_decoder=True))
        for attention, why in (
            ("linear_transformer", "has no place for"),
            ("routing_transformer", "next to its key, which attention 'routing_transformer'"),
            ("multi_head_latent_attention", "has no place for"),
        )
    ],
    # gaussian_transformer
    ("`start_offset` < 0.*`offset=False`", dict(position={"type": "gaussian_transformer", "start_offset": 0.5})),
    ("leave one of them out", dict(position={"type": "gaussian_transformer", "start_offset": -1.0, "offset": False})),
    ("'gaussian_transformer' adds terms .* 'performer", dict(position="gaussian_transformer", attention="performer")),
    # graphormer
    ("'graphormer' .* only works in an encoder", dict(position="graphormer", is_decoder=True)),
    # indigo
    ("only works in a causal decoder", dict(position="indigo")),
    ("use it with position 'indigo'", dict(variant="xf_indigo", position="rotary")),
    # learnable_sinusoidal
    ("even `hidden_size`", dict(hidden_size=15, num_attention_heads=3, position="learnable_sinusoidal")),
    # learned_absolute
    ("`max_position_embeddings` >= 1, got 0", dict(max_position_embeddings=0)),
    # per_layer_position
    ("depth signal", dict(position={"type": "per_layer_position", "depth_signal": True})),
    ("reversible", dict(position="per_layer_position", stack="reversible", residual="pre_ln")),
    # rotary
    ("`theta` > 1, got 1", dict(position={"type": "rotary", "theta": 1})),
    (
        "0.4 of head width 8 is 3; choose an even rotated width",
        dict(hidden_size=32, num_attention_heads=4, position={"type": "rotary", "fraction": 0.4}),
    ),
    # rotary_scaling
    *[
        (message, dict(hidden_size=32, num_attention_heads=2, position={"type": "rotary", "scaling": scaling}), *error)
        for message, scaling, *error in (
            ("Unknown rotary scaling 'lineer'. Did you", {"type": "lineer"}),
            ("Unknown field 'factr' of", {"type": "linear", "factr": 2.0}),
            ("scaling 'linear' needs `factor`", {"type": "linear"}),
            ("needs `factor` >= 1, got 0.5", {"type": "linear", "factor": 0.5}),
            ("factor", {"type": "linear", "factor": "2"}, TypeError),
            (">= 1 token, got 0", {"type": "yarn", "original_max_position_embeddings": 0}),
            ("`beta_fast` > `beta_slow`", {"type": "yarn", **LONG, "beta_slow": 40}),
            ("`high_freq_factor` > `low_freq", {"type": "llama3", "factor": 2.0, **LONG, "low_freq_factor": 5}),
            ("for each of 8 pairs", {"type": "longrope", "short_factor": [1], "long_factor": [1], **LONG}),
        )
    ],
    ("leave that at 1", dict(position={"type": "rotary", "scaling": "proportional", "fraction": 0.5})),
    *[
        (
            f"'{attention}' as it is set generates from keys as they were turned",
            dict(is_decoder=True, attention=attention, position={"type": "rotary", "scaling": GROWING}),
        )
        for attention in ("delta_net", "hedgehog", "linear_transformer", "lolcats", "performer", "t2r")
    ],
    # score_terms
    ("position 'deberta' adds terms of queries and keys", dict(position="deberta", attention="linear_transformer")),
    ("position 'shaw_relative' adds terms of queries", dict(position="shaw_relative", attention="linear_transformer")),
    ("untie_cls", dict(position={"type": "tupe", "untie_cls": True}, is_decoder=True)),
    ("position 'tupe' adds terms of queries and keys .* or", dict(position="tupe", attention="linear_transformer")),
    # sinusoidal_absolute
    ("even width .`hidden_size`., got", dict(position="sinusoidal_absolute", hidden_size=15, num_attention_heads=3)),
    # t5_relative_bias
    (
        r"`max_distance` above half of `num_buckets` \(16\), got 16",
        dict(position={"type": "t5_relative_bias", "max_distance": 16}),
    ),
    ("it must be even and at least 4, got 7", dict(position={"type": "t5_relative_bias", "num_buckets": 7})),
    ("it must be even and at least 4, got 2", dict(position={"type": "t5_relative_bias", "num_buckets": 2})),
]


test_refused = refusals(REFUSED)
