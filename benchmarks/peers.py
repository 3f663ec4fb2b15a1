"""One attention layer of other implementations, as callables: forward and backward on [1, T, WIDTH].

Classes of transformers run as a model of one layer whose feed-forward is eight wide, on `inputs_embeds`; packages from
the package index run their attention module. Geometry and mechanism parameters are those of the case they are compared
with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, HEADS = 512, 8
HEAD_WIDTH = WIDTH // HEADS


def of_transformers(name: str, length: int, **fields) -> nn.Module:
    """The base model `<name>Model` with one layer, dense attention through SDPA where it has any."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=16,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        max_position_embeddings=length + 2,
        **{"num_hidden_layers": 1, "intermediate_size": 8, **fields},
    )
    for rate in ("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout", "attention_dropout"):
        if hasattr(config, rate):
            setattr(config, rate, 0.0)
    return getattr(transformers, f"{name}Model")(config)


def with_biases(module: nn.Module) -> nn.Module:
    """Projections without a bias get one of zeros: those of the measured layers, and of the dense one, have biases."""
    for each in module.modules():
        if isinstance(each, nn.Linear) and each.bias is None:
            each.bias = nn.Parameter(torch.zeros(each.out_features))
    return module


def embedded(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda states: model(inputs_embeds=states)[0]


def longformer(length: int, window: int = 512):
    model = of_transformers("Longformer", length, attention_window=[window])
    return model, embedded(model)


def big_bird(length: int, block_size: int = 64, random: int = 3):
    model = of_transformers(
        "BigBird", length, attention_type="block_sparse", block_size=block_size, num_random_blocks=random
    )
    return model, embedded(model)


def reformer(length: int, hashes: int = 1, causal: bool = False):
    from transformers import ReformerConfig, ReformerModel

    config = ReformerConfig(
        attention_head_size=HEAD_WIDTH,
        attn_layers=["lsh"],
        axial_pos_embds=False,
        feed_forward_size=8,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hashes=hashes,
        num_buckets=max(2 * length // 64, 2),
        lsh_attn_chunk_length=64,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
        is_decoder=causal,
        use_cache=False,
        vocab_size=16,
    )
    model = ReformerModel(config)
    # Its two reversible streams come out side by side.
    return model, lambda states: embedded(model)(states).unflatten(-1, (2, WIDTH)).mean(-2)


def nystromformer(length: int, landmarks: int = 64, kernel: int = 65):
    model = of_transformers(
        "Nystromformer",
        length,
        num_landmarks=landmarks,
        segment_means_seq_len=length,
        conv_kernel_size=kernel,
    )
    return model, embedded(model)


def xlnet(length: int):
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(
        vocab_size=16, d_model=WIDTH, n_layer=1, n_head=HEADS, d_inner=8, dropout=0.0, attn_type="uni", mem_len=0
    )
    model = XLNetModel(config)
    return model, embedded(model)


def roformer(length: int):
    model = of_transformers("RoFormer", length, embedding_size=WIDTH)
    return model, embedded(model)


def t5(length: int):
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=16, d_model=WIDTH, d_kv=HEAD_WIDTH, d_ff=8, num_layers=1, num_heads=HEADS, dropout_rate=0.0
    )
    model = T5EncoderModel(config)
    return model, embedded(model)


def deberta_v2(length: int):
    model = of_transformers(
        "DebertaV2",
        length,
        relative_attention=True,
        position_buckets=256,
        max_relative_positions=512,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
    )
    return model, embedded(model)


def funnel(length: int, blocks: tuple[int, ...] = (2, 2, 2), readers: int = 0, inner: int = 4 * WIDTH):
    """A whole stack: blocks of layers and, where there are `readers`, as many layers after up-sampling."""
    from transformers import FunnelBaseModel, FunnelConfig, FunnelModel

    config = FunnelConfig(
        vocab_size=16,
        block_sizes=list(blocks),
        num_decoder_layers=max(readers, 1),
        d_model=WIDTH,
        n_head=HEADS,
        d_head=HEAD_WIDTH,
        d_inner=inner,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
    model = FunnelModel(config) if readers else FunnelBaseModel(config)
    return model, embedded(model)


def performer_pytorch(length: int, features: int = 256, causal: bool = False, product: str = "torch"):
    """product: how causal sums are made, "torch" or "c++" (the extension of pytorch-fast-transformers, which the
    package itself takes up on CUDA only)."""
    from performer_pytorch import SelfAttention
    from performer_pytorch.performer_pytorch import causal_linear_attention

    module = SelfAttention(dim=WIDTH, heads=HEADS, dim_head=HEAD_WIDTH, nb_features=features, causal=causal)
    if product == "c++":
        from fast_transformers.causal_product import causal_product_cpu  # noqa: F401  (missing: say so here)

        module.fast_attention.causal_linear_fn = causal_linear_attention
    return with_biases(module), module


def fast_transformers(length: int, attention: str, causal: bool = False, **fields):
    """A layer of pytorch-fast-transformers. Its extensions are compiled when it is installed, with torch there
    already: pip install --no-build-isolation pytorch-fast-transformers (where an `nvcc` is on the path but no CUDA,
    take it off)."""
    from fast_transformers import attention as kinds
    from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

    layer = kinds.AttentionLayer(getattr(kinds, attention)(**fields), WIDTH, HEADS)
    mask = TriangularCausalMask(length) if causal else FullMask(length)
    lengths = LengthMask(torch.tensor([length]))
    return layer, lambda states: layer(states, states, states, mask, lengths, lengths)


def fast_reformer(length: int, hashes: int = 1, causal: bool = False):
    """As many buckets as [`reformer`], and chunks of as many tokens."""
    fields = {"chunk_size": 64, "bits": max(length // 64, 1), "rounds": hashes, "attention_dropout": 0.0}
    return fast_transformers(length, "ReformerAttention", causal, **fields)


def linformer(length: int, rank: int = 256):
    from linformer import LinformerSelfAttention

    module = LinformerSelfAttention(dim=WIDTH, seq_len=length, heads=HEADS, k=rank)
    return with_biases(module), module


def routing_transformer(length: int, window: int = 128, causal: bool = False):
    from routing_transformer.routing_transformer import SelfAttention

    module = SelfAttention(
        dim=WIDTH,
        depth=1,
        max_seq_len=length,
        heads=HEADS,
        local_attn_heads=0,
        window_size=window,
        causal=causal,
    )
    return with_biases(module), lambda states: module(states)[0]


def reformer_pytorch(length: int, hashes: int = 1, causal: bool = False):
    from reformer_pytorch import LSHSelfAttention

    module = LSHSelfAttention(dim=WIDTH, heads=HEADS, bucket_size=64, n_hashes=hashes, causal=causal)
    return with_biases(module), module


def memory_compressed_attention(length: int):
    from memory_compressed_attention import MemoryCompressedAttention

    module = MemoryCompressedAttention(WIDTH, heads=HEADS, compression_factor=3)
    return with_biases(module), module


def nystrom_attention(length: int, landmarks: int = 64, kernel: int = 65):
    from nystrom_attention import NystromAttention

    module = NystromAttention(
        dim=WIDTH, heads=HEADS, dim_head=HEAD_WIDTH, num_landmarks=landmarks, residual_conv_kernel=kernel
    )
    return with_biases(module), module


def linear_attention_transformer(length: int, causal: bool = False):
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    module = SelfAttention(dim=WIDTH, heads=HEADS, causal=causal, dim_head=HEAD_WIDTH, blindspot_size=1)
    return with_biases(module), module


def talking_heads(length: int):
    from x_transformers.x_transformers import Attention

    module = Attention(dim=WIDTH, heads=HEADS, dim_head=HEAD_WIDTH, pre_talking_heads=True, post_talking_heads=True)
    return with_biases(module), lambda states: module(states)[0]


def training_step(
    made: tuple[nn.Module, Callable[[Tensor], Tensor]], length: int, residual: bool = False
) -> Callable[[], None]:
    """Forward and backward of a model or, with the residual sum that a model's layer has, of a layer by itself."""
    module, call = made
    module.train()
    states = torch.randn(1, length, WIDTH)

    def run() -> None:
        output = call(states)  # held through the backward pass, as theirs is
        hidden = states + output if residual else output
        hidden.sum().backward()
        module.zero_grad(set_to_none=True)

    return run
