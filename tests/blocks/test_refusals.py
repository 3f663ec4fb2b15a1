"""What configs refuse of blocks, in one sentence: a line for each."""

from tests.refused import refusals

REFUSED = [
    # convolution
    ("odd `kernel`, got 4", dict(block={"type": "convolution", "kernel": 4})),
    ("`hidden_size` 16 into", dict(hidden_size=16, num_attention_heads=4, block={"type": "convolution", "groups": 3})),
    ("unknown activation 'wavy'", dict(block={"type": "convolution", "activation": "wavy"})),
    ("convolution needs `layers` >= 0", dict(block={"type": "convolution", "layers": ()})),
    ("`layers` from 0 to", dict(block={"type": "convolution", "layers": (99,)})),
    ("`layers` from 0 to", dict(block={"type": "cpe", "layers": (0, 99)})),
    ("no place for in a decoder", dict(block="convolution", attention="linear_transformer", is_decoder=True)),
    ("residual 'no_residual' would put in its place", dict(block="convolution", residual="no_residual")),
    ("convolution", dict(block="convolution", stack="reversible", residual="pre_ln")),
    # cpe
    ("cpe needs `layers` >= 0", dict(block={"type": "cpe", "layers": (-1,)})),
    ("odd `kernel`", dict(block={"type": "cpe", "kernel": 4})),
    ("rows, columns", dict(block={"type": "cpe", "grid_size": (3,)})),
    ("images alone", dict(block={"type": "cpe", "border": "circular"})),
    ("cannot stand in a decoder", dict(block={"type": "cpe", "grid_size": (2, 2)}, is_decoder=True)),
    ("no place for in a decoder", dict(block="cpe", attention="linear_transformer", is_decoder=True)),
    # dartsformer
    ("two or more parts", dict(block={"type": "dartsformer", "operations": ()})),
    ("two or more parts", dict(block={"type": "dartsformer", "operations": (("glu",),)})),
    ("same number", dict(block={"type": "dartsformer", "operations": (("glu", "ffn"), ("glu", "ffn", "zero"))})),
    ("unknown operation 'wave'", dict(block={"type": "dartsformer", "operations": (("glu", "wave"),)})),
    ("unknown operation", dict(block={"type": "dartsformer", "operations": (("cross_attention", "ffn"),)})),
    ("two different `candidates` or more", dict(block={"type": "dartsformer", "candidates": ("glu",)})),
    ("in 3 parts", dict(hidden_size=32, num_attention_heads=2, block="dartsformer", is_encoder_decoder=True)),
    ("normalizes parts", dict(block="dartsformer", normalization="power_norm")),
    ("not made for", dict(block="dartsformer", attention="longformer")),
    ("no place for in a decoder", dict(block="dartsformer", attention="linear_transformer", is_decoder=True)),
    # delight
    ("2 <= `min_depth` <= `max_depth`, got 1", dict(block={"type": "delight", "min_depth": 1})),
    ("2 <= `min_depth`", dict(block={"type": "delight", "min_depth": 5, "max_depth": 4})),
    ("`width_mult` of 1 / `proj_factor`", dict(block={"type": "delight", "width_mult": 0.25})),
    ("unknown activation 'wavy'", dict(block={"type": "delight", "activation": "wavy"})),
    ("up to 8 groups", dict(hidden_size=24, block="delight")),
    ("normalizes groups of channels", dict(block="delight", normalization="power_norm")),
    ("`aggregation`", dict(block="delight", attention={"type": "dense", "aggregation": "capsule_heads"})),
    ("not made for", dict(block="delight", attention="longformer")),
    ("set `head_dim=16`", dict(hidden_size=32, num_attention_heads=1, position="rotary", block="delight")),
    # evolved_transformer
    ("2 sizes of 1 or more under `en", dict(block={"type": "evolved_transformer", "encoder_kernels": (3,)})),
    ("3 sizes of 1 or more under `de", dict(block={"type": "evolved_transformer", "decoder_kernels": (3, 0, 1)})),
    ("odd `encoder_kernels`", dict(block={"type": "evolved_transformer", "encoder_kernels": (3, 4)})),
    (
        "13 heads cannot share",
        dict(block={"type": "evolved_transformer", "wide_heads": 13}, residual="pre_ln", is_decoder=True),
    ),
    ("normalizes its branches", dict(block="evolved_transformer", normalization="power_norm")),
    ("use 'pre_ln'", dict(block="evolved_transformer", is_decoder=True)),
    ("16 heads of width", dict(block="evolved_transformer", position="alibi", residual="pre_ln", is_decoder=True)),
    ("has two in a", dict(block="evolved_transformer", position="deberta", residual="pre_ln", is_decoder=True)),
    ("even `hidden_size`", dict(hidden_size=15, num_attention_heads=1, block="evolved_transformer")),
    (
        "no place for in a decoder",
        dict(block="evolved_transformer", attention="linear_transformer", residual="pre_ln", is_decoder=True),
    ),
    # lite_transformer
    ("leave channels for both", dict(block={"type": "lite_transformer", "attn_channels": 768})),
    ("5 `conv_heads` cannot share", dict(block={"type": "lite_transformer", "conv_heads": 5})),
    ("odd `kernel_sizes`, got 4", dict(block={"type": "lite_transformer", "kernel_sizes": (4,)})),
    ("12 heads cannot", dict(block={"type": "lite_transformer", "attn_channels": 9, "conv_heads": 3})),
    ("set `head_dim=32`", dict(block="lite_transformer", position="rotary")),
    ("makes its terms for", dict(block="lite_transformer", position="deberta")),
    ("not made for", dict(block="lite_transformer", attention="longformer")),
    ("no place for in a", dict(block="lite_transformer", attention="linear_transformer", is_decoder=True)),
    # no_ffn
    ("no_ffn", dict(block="no_ffn")),
    # orders
    ("intermediate_size", dict(intermediate_size=1, block="macaron")),
    ("does more than add to it", dict(block="parallel")),
    ("shared_norm", dict(block={"type": "parallel", "shared_norm": True}, residual="rezero")),
    ("coefficient", dict(num_hidden_layers=3, block={"type": "sandwich", "coefficient": 3})),
    ("side by side", dict(block="parallel", residual="pre_ln", stack="reversible")),
    # r_transformer
    (
        "more than `max_position_embeddings`",
        dict(block={"type": "r_transformer", "window": 9}, max_position_embeddings=8),
    ),
    ("no place for in a decoder", dict(block="r_transformer", attention="linear_transformer", is_decoder=True)),
    # separable_convolution
    ("two sizes", dict(block={"type": "separable_convolution", "kernels": (3,)})),
    ("odd `kernels`, got 4", dict(block={"type": "separable_convolution", "kernels": (3, 4)})),
    ("no place for in a", dict(block="separable_convolution", attention="linear_transformer", is_decoder=True)),
    # hybrid_heads
    ("reads a text from its beginning", dict(block="hybrid_heads", residual="pre_ln")),
    ("one norm before them", dict(block="hybrid_heads", is_decoder=True)),
    ("whose state decays", dict(block={"type": "hybrid_heads", "mixer": "dense"})),
    ("has two", dict(block="hybrid_heads", position="deberta", residual="pre_ln", is_decoder=True)),
    ("no place for", dict(block="hybrid_heads", attention="linear_transformer", residual="pre_ln", is_decoder=True)),
    # mask_attention_network
    ("has two", dict(block="mask_attention_network", position="deberta", residual="pre_ln")),
    (
        "keys and values of a second attention",
        dict(block="mask_attention_network", attention="linear_transformer", is_decoder=True, residual="pre_ln"),
    ),
]


test_refused = refusals(REFUSED)
