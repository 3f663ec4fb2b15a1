"""Image GPT: an image as a text of colors."""

import torch

from tests.conversion.architectures import VOCAB, Architecture


def whole_images(head, given):
    """Their classifier reads padding, which images have none of."""
    if "Classification" in head:
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
    return given


ARCHITECTURE = Architecture(
    model_type="imagegpt",
    ours="xf_image_gpt",
    tiny=dict(vocab_size=VOCAB + 1, n_embd=32, n_layer=2, n_head=4, n_positions=24, pad_token_id=0),
    heads={
        "ImageGPTModel": "Model",
        "ImageGPTForCausalImageModeling": "ForCausalLM",
        "ImageGPTForImageClassification": "ForSequenceClassification",
    },
    variations={
        "unscaled": {"scale_attn_weights": False, "n_inner": 48},
        "gelu": {"activation_function": "gelu", "n_head": 2, "layer_norm_epsilon": 1e-3},
    },
    base=dict(n_embd=768, n_layer=12, n_head=12),
    sides=("right",),  # positions count padding on the left
    inputs=whole_images,
    refused=frozenset(
        {
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
            "add_cross_attention",
            "tie_word_embeddings",
        }
    ),
    noted=frozenset({"embd_pdrop"}),
    other_values={"activation_function": "gelu"},
)
