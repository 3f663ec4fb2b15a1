"""What a layer keeps for its backward pass: nothing in proportion to all pairs of tokens, where it promises so."""

from contextlib import nullcontext

import pytest
import torch

from tests.attention.score_helpers import (
    HEADS,
    WIDTH,
    build_layers,
    make_context,
    run_layers,
    saved_sizes,
    small_blocks,
    vectors,
)

D = WIDTH // HEADS
TEXTS = (64, 256)


def by_token(each, least=0):
    """The largest tensor: so many numbers for each token, or `least`."""
    return lambda length: max(length * each, least)


# fmt: off
# Spec, forms, lengths, the bound on the largest tensor, rows of small blocks of queries (None: blocks as they are).
LARGEST = [
    ({"type": "clustered_attention", "num_clusters": 16}, (False,), TEXTS, by_token(2 * WIDTH), None),
    ({"type": "improved_clustered_attention", "num_clusters": 16, "topk": 2}, (False,), TEXTS, by_token(2 * WIDTH),
     None),
    ({"type": "csalr", "num_landmarks": 8}, (False,), TEXTS, by_token(8 * HEADS), None),
    ({"type": "nystromformer", "num_landmarks": 8, "conv_kernel_size": 3}, (False,), TEXTS, by_token(8 * HEADS), None),
    ({"type": "set_transformer", "num_inducing": 8}, (False,), TEXTS, by_token(8 * HEADS), None),
    ({"type": "linformer", "projected_length": 8, "max_length": 256}, (False,), TEXTS, by_token(8 * HEADS), None),
    ({"type": "luna", "projected_length": 8}, (False, True), TEXTS, by_token(8 * HEADS), None),
    ({"type": "low_rank_band", "low_rank": 2, "band_width": 1}, (False, True), TEXTS, by_token(2 * WIDTH), None),
    # Each of the r phases has its own copy of the slots.
    ({"type": "memory_compressed_attention", "layer_pattern": "M", "compression_factor": 32}, (False, True), TEXTS,
     by_token(WIDTH, 32 * WIDTH**2), None),
    ({"type": "informer", "sampling_factor": 1}, (False,), (512,), by_token(7 * HEADS), None),
    ({"type": "localness", "layers": 1}, (False,), (600, 1200), by_token(64), None),
    ({"type": "linear_transformer"}, (True,), TEXTS, by_token(WIDTH), None),  # and no state for every token
    ({"type": "performer", "num_features": 128}, (True,), TEXTS, by_token(127), None),  # features are made again
    # At most so many segments keep a state each.
    ({"type": "delta_net"}, (True,), TEXTS, by_token(WIDTH, 16 * HEADS * 2 * D * 3 * D), None),
    *(({"type": name, "chunk_size": 64, **fields}, (True,), TEXTS, by_token(WIDTH, 17 * HEADS * 256 * D), None)
      for name, fields in (("performer", {"feature_kind": "trigonometric", "num_features": 128}),
                           ("arccos_attention", {"num_features": 128}), ("rfa", {"num_features": 128}),
                           ("dpfp", {"nu": 2}))),
    *(({"type": "synthesizer", "kind": kind, "max_length": 400}, (False,), (100, 400), by_token(4 * WIDTH), rows)
      for kind, rows in (("dense", None), ("factorized_random", None), ("dense+dot", None),
                         ("factorized_dense+dot", 8))),
    ({"type": "talking_heads"}, (False,), (60, 120), by_token(WIDTH), 8),
    ({"type": "transformer_xl"}, (True,), (40,), by_token(HEADS * 20 - 1), 4),
    ({"type": "collaborative_attention"}, (False,), (80,), by_token(79), 3),
    ({"type": "ca_mtl"}, (False,), (80,), by_token(80, 400 * 32), 3),  # the table of this layer, and no scores
    *(({"type": "dense", "losses": (loss,)}, (False,), (60,), by_token(59), 3)
      for loss in ({"type": "disagreement_regularization", "of": ("position",)},
                   {"type": "attention_guidance", "same": 1, "next": 1, "previous": 1, "first": 1})),
]
# Spec, form, two lengths of which the second is double the first, and how much more all tensors together may be.
GROWTH = [
    ({"type": "adaptively_sparse"}, True, (512, 1024), 2.3, None),
    *(({"type": "adaptive_span", "max_span": 600, "ramp": 3, "relative_keys": keys, "start": 0.01}, True, (300, 600),
       2.2, 8) for keys in (True, False)),
    *(({"type": name, **fields}, False, (512, 1024), 2.3, None)
      for name, fields in (("hedgehog", {}), ("t2r", {}), ("lolcats", {"window": 8, "chunk_size": 8}))),
    ({"type": "sinkhorn_transformer", "block_size": 32}, True, (512, 1024), 2.4, None),  # and a number for two blocks
]
# fmt: on


def kept(spec, causal, length, rows):
    (layer,) = build_layers(spec, causal=causal, max_position_embeddings=1024 if length > 400 else 400)
    if spec["type"] == "adaptive_span":
        layer.initialize(layer.config, torch.nn.init)
    layer.train().dropout = 0.0
    with small_blocks(rows) if rows else nullcontext():
        return saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length, causal)))


def words(value):
    return " ".join(map(str, value.values())) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("spec", "forms", "lengths", "bound", "rows"), LARGEST, ids=words)
def test_largest_tensor(spec, forms, lengths, bound, rows):
    for causal in forms:
        for length in lengths:
            sizes = kept(spec, causal, length, rows)
            assert sizes[0] <= bound(length), sizes[:3]


@pytest.mark.parametrize(("spec", "causal", "lengths", "most", "rows"), GROWTH, ids=words)
def test_growth(spec, causal, lengths, most, rows):
    short, long = (sum(kept(spec, causal, length, rows)) for length in lengths)
    assert long < most * short
