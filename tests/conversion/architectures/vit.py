"""ViT and DeiT."""

from tests.conversion.architectures import Architecture, named

TINY = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=12,
    patch_size=4,
    encoder_stride=4,
    layer_norm_eps=1e-6,
)
HEADS = ("ForImageClassification", "ForMaskedImageModeling", "Model")
COMMON = dict(
    ours="xf_vision_transformer",
    tiny=TINY,
    sides=("right",),  # images have no padding
    raw_last_state=True,
    variations={
        "activation": {"hidden_act": "gelu_new"},
        "other constants": {"layer_norm_eps": 1e-12, "pooler_act": "relu", "num_labels": 5},
        "wide patches": {"image_size": (12, 12), "patch_size": (2, 6), "encoder_stride": 16},
    },
    refused=frozenset({"qkv_bias", "pooler_output_size"}),
    unread=frozenset({"encoder_stride"}),
    other_values={"pooler_act": "relu", "image_size": 16, "patch_size": 6},
)
VIT = Architecture(
    model_type="vit",
    heads=named("ViT", *HEADS),
    **COMMON,
)
DEIT = Architecture(
    model_type="deit",
    heads=named("DeiT", *HEADS),
    headless={"DeiTForImageClassificationWithTeacher": "Model"},
    **COMMON,
)
ARCHITECTURES = (VIT, DEIT)
