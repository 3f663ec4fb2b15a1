"""What single mechanisms have beside their equations, a test or two each: starts, sizes, precision, what is kept."""

import copy

import pytest
import torch
from torch.nn import functional as F

from hf_xformers import (
    XFLunaConfig,
    XFLunaForCausalLM,
    XFLunaForMaskedLM,
    XFLunaForSeq2SeqLM,
    XFormerConfig,
    XFormerForMaskedLM,
    XFormerModel,
)
from hf_xformers.attention.luna import PackedMemory
from hf_xformers.attention.shared.score_chain import Link
from hf_xformers.conversion import swap_components
from hf_xformers.ops.block_sparse.attention import block_sparse_attention, block_sparse_reference
from hf_xformers.ops.block_sparse.patterns import dilated
from hf_xformers.ops.landmarks import ridge_solve
from hf_xformers.variants import family
from tests.attention.references.patterns import drawn_blocks
from tests.attention.references.softmax import localness_windows
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    WIDTH,
    build_layers,
    in_pieces,
    make_context,
    run_layers,
    saved_sizes,
    split_heads,
    vectors,
)
from tests.helpers import close, tokens

D = WIDTH // HEADS
RANDOM = {"type": "random_attention", "block_size": 2, "num_random_blocks": 2, "random_seed": 3}
DIET = {"type": "transformer_on_a_diet"}
SCALES = {
    "type": "multi_scale_transformer",
    "scales": (1, 3, 0.25),
    "heads_per_scale": ((4, 0, 0), (3, 1, 0), (2, 1, 1)),
}
LUNA = {"type": "luna", "projected_length": 4, "chunk_size": 4}

# ------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ({"type": "band_attention", "window_size": 3}, [2] * 3),
        ({"type": "dilated_attention", "window_size": 2, "dilation": 3}, [3] * 3),
        ({"type": "block_local_attention", "block_size": 3, "blocks_before": 1}, [20] * 3),
        ({"type": "adaptive_span", "max_span": 3, "ramp": 2}, [3] * 3),
        *(({"type": "sliding_window", "window_size": 3, "sinks": k}, [k + 3] * 3) for k in (2, 12)),  # a ring
        ({**DIET, "diet_type": "cascade"}, [3, 7, 15]),
        ({**DIET, "diet_type": "dilated"}, [2, 4, 8]),
        ({**DIET, "diet_type": "dilated_mem"}, [2, 4, 8]),
        ({**DIET, "diet_type": "full"}, [20] * 3),
        ({"type": "multi_scale_transformer", **SCALES}, [1, 3, 6]),  # a quarter of 24 positions
    ],
    ids=str,
)
def test_caches_keep_what_a_layer_reads(spec, kept):
    layers = build_layers(spec, 3, True)
    whole = run_layers(layers, vectors(2, 20), make_context(20, True))[-1].output
    with torch.no_grad():
        found, cache = in_pieces(layers, vectors(2, 20), None, (9, *(1,) * 11))
    close(found, whole)
    assert [layer.keys.shape[2] for layer in cache.layers] == kept
    assert "sinks" not in spec or [layer.sinks[0].shape[2] for layer in cache.layers] == [spec["sinks"]] * 3


# ------------------------------------------------------------------------------------------- starts


def test_alphas_of_each_head_and_layer():
    """Drawn as N(0, 1), apart for each kind of attention; as many as heads, or one; none where alpha is given."""
    for fields, count in (({}, HEADS), ({"share_alpha": True}, 1), ({"alpha": 1.5}, 0)):
        (layer,) = build_layers({"type": "adaptively_sparse", **fields})
        assert sum(p.numel() for key, p in layer.named_parameters() if "proj" not in key) == count
    fields = {**GEOMETRY, "num_attention_heads": 16, "is_encoder_decoder": True}
    model_class = family("xf_adaptively_sparse_transformer")["ForSeq2SeqLM"]
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields))
    drawn = torch.stack([p for name, p in model.named_parameters() if name.endswith("attention.shape")])
    assert drawn.shape == (9, 16) and 0.8 < drawn.std() < 1.2 and len(drawn.flatten().unique()) == drawn.numel()


def test_entries_of_all_attention_have_unit_variance():
    torch.manual_seed(0)
    fields = {**GEOMETRY, "intermediate_size": 400, "block": "no_ffn", "attention": "all_attention"}
    layer = XFormerModel(XFormerConfig(**fields)).trunk.layers[0].attention
    assert abs((layer.memory_keys * 2).std() - 1) < 0.05 and abs((layer.memory_values * 20).std() - 1) < 0.05


def test_lambdas_of_differential_attention():
    """The vectors are random, of the given size; lambda starts near 0.8 - 0.6 exp(-0.3 l) for layers from 0 on."""
    for index, expected in ((0, 0.2), (3, 0.8 - 0.6 * 0.40656965974059917)):
        layer = build_layers({"type": "differential_attention", "lambda_std": 1e-4}, index + 1)[index]
        layer.initialize(layer.config, torch.nn.init)
        names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        assert all(0 < getattr(layer, name).abs().max() < 1e-3 for name in names)
        assert abs(layer.subtracted().item() - expected) < 1e-6


def test_random_rows_of_delta_nets():
    """Those of `favor` are a buffer; other features have none."""
    favor = {"type": "delta_net", "feature_map": "favor"}
    (layer,) = build_layers({**favor, "num_features": 3}, causal=True)
    assert layer.draw(0).shape == (3, D)
    assert {name for name, _ in layer.named_buffers()} == {"directions", "passes", "draws"}
    assert build_layers({**favor, "attention_normalize": True}, causal=True)[0].draw(0).shape == (D, D)
    assert not list(build_layers({"type": "delta_net", "feature_map": "elu"}, causal=True)[0].buffers())


@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks(causal):
    """The drawn blocks, read from the pattern's own table, and what is promised about them."""
    first, second = build_layers(RANDOM, 2, causal)
    drawn = {}
    for number, layer in enumerate((first, second)):
        for count in (5, 9, 12):  # texts of every length have as many
            drawn[number] = drawn_blocks(layer, count)
            for table in drawn[number]:
                for row, blocks in enumerate(table):
                    real = [block for block in blocks if block >= 0]
                    assert len(set(real)) == len(real) == min(2, row if causal else count - 1)
                    assert all(block < row if causal else block != row and 0 <= block < count for block in real)
    assert drawn[0] != drawn[1] and drawn[0][0] != drawn[0][1]  # anew in every layer and head
    again = build_layers(RANDOM, 1, causal)[0]
    assert again.pattern == first.pattern and copy.deepcopy(first).pattern == first.pattern
    assert build_layers({**RANDOM, "random_seed": 4}, 1, causal)[0].pattern != first.pattern


def test_pooled_heads():
    """Up-training to one key head starts from the mean of all, which is the model itself where they were alike."""
    source = XFormerForMaskedLM(XFormerConfig(**GEOMETRY)).eval()
    with torch.no_grad():
        for layer in source.model.trunk.layers:
            for part in (layer.attention.k_proj, layer.attention.v_proj):
                part.weight.copy_(torch.randn(D, WIDTH).repeat(HEADS, 1))
                part.bias.copy_(torch.randn(D).repeat(HEADS))
    pooled, report = swap_components(source, num_key_value_heads=1, measure=False)
    ids = tokens(2, 7, high=50)
    assert pooled.config.key_value_heads == 1 and any("mean" in how for _, _, how in report.derived)
    with torch.no_grad():
        close(pooled(ids).logits, source(ids).logits, 1e-5)


# ------------------------------------------------------------------------------------------- layers


def test_layers_decide_their_own():
    """Gaps, queries, levels, kinds and windows by layer."""
    gaps = {"type": "dilated_attention", "window_size": 2, "dilation": (1, (1, 1, 2, 4), 2)}
    assert len({layer.pattern for layer in build_layers(gaps, 3)}) == 3
    near, band = ({"type": "dilated_attention", "dilation": 1}, {"type": "band_attention"})
    assert build_layers({**near, "window_size": 3})[0].pattern == build_layers({**band, "window_size": 3})[0].pattern

    for fields, expected in (
        ({}, [True, False, True, False, True]),
        ({"block_size": 1}, [True] * 5),
        ({"block_size": 9}, [True, False, False, False, False]),
        ({"block_sizes": (1, 3, 1)}, [True, True, False, False, True]),
    ):
        layers = build_layers({"type": "lazyformer", **fields}, 5, num_hidden_layers=5)
        assert [layer.q_proj is not None for layer in layers] == expected, fields

    def levels(count, **fields):
        config = XFormerConfig(
            **{**GEOMETRY, "num_hidden_layers": count}, attention={"type": "poolingformer", **fields}
        )
        return [layer for layer in range(count) if config.attention.has_two_levels(config, layer)]

    assert levels(12) == [5, 6, 7] and levels(1) == [0] and levels(2) == [1] and len(levels(24)) == 6
    assert levels(4, two_level_layers=(0, 3)) == [0, 3]

    for fields, expected in (({}, "LMLML"), ({"layer_pattern": "MML"}, "MMLMM")):
        layers = build_layers({"type": "memory_compressed_attention", **fields}, 5, num_hidden_layers=5)
        assert "".join("L" if "Local" in type(layer).__name__ else "M" for layer in layers) == expected

    layers = build_layers({"type": "localness", "layers": None}, 3)  # two of three, and dense ones above
    assert [layer.is_local for layer in layers] == [True, True, False]
    (dense,), states = build_layers("dense"), vectors(2, 6)
    dense.load_state_dict(layers[2].state_dict())
    close(*(run_layers([each], states, make_context(6))[0].output for each in (layers[2], dense)))


def test_norms_of_summaries_by_layer():
    spec = {"type": "transient_global", "window_size": 2, "block_size": 3, "num_buckets": 4, "max_distance": 3}
    other = {1: {"normalization": "rms_norm"}}
    model = XFormerModel(XFormerConfig(**GEOMETRY, attention=spec, position="none", per_layer_config=other))
    summaries = [type(layer.attention.summary_norm) for layer in model.trunk.layers]
    assert summaries[0] is summaries[2] is not summaries[1]
    assert model(tokens(2, 9, high=50)).last_hidden_state.isfinite().all()
    model(tokens(2, 2, high=50)).last_hidden_state.sum().backward()  # too short for a block: processes wait for all
    assert all(p.grad is not None for layer in model.trunk.layers for p in layer.attention.parameters())


def test_where_the_memory_of_luna_goes():
    """An encoder packs in every layer; a decoder's memory is one parameter that no text changes; in an encoder-decoder
    the decoder's memory is changed by cross-attention, hence by the encoder's text."""
    fields = {**GEOMETRY, "attention": LUNA, "cross_attention": LUNA}

    def names(model):
        return [name for name, _ in model.named_parameters() if name.endswith((".memory", "memory_norm.weight"))]

    encoder = XFLunaForMaskedLM(XFLunaConfig(**fields))
    layer = "model.trunk.layers.{}.attention."
    assert names(encoder) == [layer.format(0) + "memory", *(layer.format(i) + "memory_norm.weight" for i in (0, 1))]
    assert names(XFLunaForCausalLM(XFLunaConfig(**fields))) == [layer.format(0) + "memory"]
    both = names(XFLunaForSeq2SeqLM(XFLunaConfig(**fields, is_encoder_decoder=True)))
    layer = "model.decoder.layers.{}."
    assert [name for name in both if name.startswith("model.decoder")] == [
        layer.format(0) + "attention.memory",
        *(layer.format(i) + "cross_attention.memory_norm.weight" for i in (0, 1)),
    ]


def test_deep_models_are_built():
    config = XFormerConfig(**{**GEOMETRY, "num_hidden_layers": 70}, attention={**DIET, "diet_type": "dilated"})
    assert config.attention.pattern(config, 69).allows(torch.tensor(5), torch.arange(9)).nonzero().item() == 5


# ------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_long_texts(dtype):
    """A sum of 4096 numbers near 1 in half precision would stop growing, or be rounded to whole numbers."""
    (layer,) = build_layers({"type": "average_attention", "use_ffn": False, "use_gate": False}, 1, True)
    states = (1 + 0.1 * vectors(1, 4096)).to(dtype)
    expected = states.double().cumsum(1) / torch.arange(1, 4097)[:, None]
    output = run_layers([layer.to(dtype)], states, make_context(4096, True))[0].output
    assert (output.double() - expected).abs().max() < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["predictive_attention", "realformer"])
def test_scores_that_layers_pass_on_stay_in_single_precision(name):
    layers = [layer.to(torch.bfloat16) for layer in build_layers(name, 3)]
    results = run_layers(layers, vectors(1, 6).to(torch.bfloat16), make_context(6))
    (handed,) = (state.scores for (kind, _), state in results[-1].states.items() if kind is Link)
    assert handed.dtype == torch.float32 and results[-1].output.dtype == torch.bfloat16
    assert name == "realformer" or layers[1].score_conv.conv.weight.dtype == torch.float32


def test_what_the_solver_of_csalr_solves():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64).softmax(-1)
    right = torch.randn(3, 8, 5, generator=generator, dtype=torch.float64)
    close((matrix + torch.eye(8).double()) @ ridge_solve(matrix, right, 1.0), right, 1e-12)
    # Two landmarks that read each other alone, as scores in float32 can round to: the smallest solution.
    swap = torch.eye(4)[[1, 0, 2, 3]]
    narrow = right[0, :4].float().requires_grad_()
    found = ridge_solve(swap, narrow, 1.0)
    close(found, torch.linalg.pinv(swap + torch.eye(4)) @ narrow, 1e-5)
    found.sum().backward()
    assert narrow.grad.isfinite().all()


# ------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("path", ["weights", "projections"])
def test_dropout_of_a_shared_map_is_drawn_once(path):
    fields = {"num_hidden_layers": 2, "attention_probs_dropout_prob": 0.5}
    layers = build_layers({"type": "lazyformer", "hand_on": path}, 2, **fields)
    results = run_layers([layer.train() for layer in layers], vectors(1, 6), make_context(6))
    (kept,) = (state.weights for (kind, _), state in results[0].states.items() if kind is Link)
    assert (kept == 0).any()
    value = split_heads(layers[1].v_proj(vectors(1, 6) + results[0].output), 4)
    close(results[1].output, layers[1].o_proj((kept @ value).transpose(1, 2).flatten(2)))


def test_dropout_of_luna():
    """On what tokens read, with `attention_probs_dropout_prob`; with `memory_dropout` on what is added to the memory,
    not on what tokens read; in evaluation on nothing."""
    (layer,) = build_layers(LUNA, attention_probs_dropout_prob=0.3)
    with torch.no_grad():
        draws = [run_layers([layer.train()], vectors(1, 6), make_context(6))[0].output for _ in range(2)]
    assert (draws[0] - draws[1]).abs().max() > 1e-3
    handed = {}
    for rate in (None, 0.0, 0.5):
        fields = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.5}
        layer = build_layers({**LUNA, "memory_dropout": rate}, 2, **fields)[0].train()
        results = [run_layers([layer], vectors(1, 6), make_context(6))[0] for _ in range(2)]
        close(results[0].output, results[1].output)
        first, second = (result.states[PackedMemory, None].states for result in results)
        assert torch.equal(first, second) == (rate == 0.0)
        layer.eval()
        handed[rate] = run_layers([layer], vectors(1, 6), make_context(6))[0].states[PackedMemory, None].states
    close(handed[None], handed[0.5])


# ------------------------------------------------------------------------------------------- further limits


def test_memory_alone_is_a_softmax_network():
    """All-attention on a text of padding alone: softmax(q U / sqrt(d)) V, the feed-forward that the paper starts
    from."""
    (layer,) = build_layers("all_attention", block="no_ffn")
    states, mask = vectors(1, 3), torch.zeros(1, 3, dtype=torch.bool)
    output = run_layers([layer], states, make_context(3, padding_mask=mask))[0].output
    scores = split_heads(layer.q_proj(states), D) @ layer.memory_keys.mT
    values = layer.memory_values * layer.memory_values.shape[1] ** 0.5
    close(output, layer.o_proj((torch.softmax(scores, -1) @ values).transpose(1, 2).flatten(2)))


def test_padding_takes_no_columns_of_linformer():
    """A row of n real tokens fits, wherever its padding stands; one more does not."""
    (layer,) = build_layers({"type": "linformer", "sharing": "headwise", "projected_length": 3, "max_length": 9})
    with torch.no_grad():
        expected = run_layers([layer], vectors(1, 9), make_context(9))[0].output
        for where in (slice(0, 9), slice(4, 13)):
            mask = torch.zeros(1, 13).bool()
            mask[:, where] = True
            padded = torch.full((1, 13, WIDTH), 7.0).double()
            padded[:, where] = vectors(1, 9)
            for implementation in ("eager", "sdpa"):
                context = make_context(13, padding_mask=mask, implementation=implementation)
                close(run_layers([layer], padded, context)[0].output[:, where], expected)
        (reader,) = build_layers({"type": "linformer", "max_length": 9}, cross=True, is_encoder_decoder=True)
        for implementation in ("eager", "sdpa"):
            for each, memory in ((layer, None), (reader, vectors(1, 10))):
                context = make_context(10, implementation=implementation)
                with pytest.raises(ValueError, match="10 tokens, but this linformer projects 9"):
                    run_layers([each], vectors(1, 10), context, memory)


@pytest.mark.parametrize("causal", [False, True])
def test_localness_is_two_further_columns(causal):
    """-(j - P)^2 c = -c j^2 + 2 c P j and a number of the row, of queries and keys."""
    (layer,), states = build_layers({"type": "localness", "layers": 1}, 1, causal), vectors(1, 9)
    q, k, v = (split_heads(p(states), D) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    place = torch.arange(1.0, 10.0).double()
    columns = torch.zeros(1, HEADS, 9, 2).double()
    for (h, i), (centre, width, _) in localness_windows(layer, states, None, causal).items():
        sharpness = 0.5 / max(width / 2, 0.5) ** 2
        columns[0, h, i] = torch.tensor([-sharpness, 2 * sharpness * centre], dtype=torch.float64)
    of_keys = torch.stack((place**2, place), -1).expand(1, HEADS, -1, -1)
    query = torch.cat((q / D**0.5, columns), -1)
    mixed = F.scaled_dot_product_attention(query, torch.cat((k, of_keys), -1), v, is_causal=causal, scale=1.0)
    found = run_layers([layer], states, make_context(9, causal))[0].output
    close(found, layer.o_proj(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("gap", [3, 40, 70, 2**39])
def test_gaps_near_and_beyond_the_text(gap):
    """Classes of tokens are as many as the text has, however large the gap is."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 80, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    for queries, offset in ((80, 0), (7, 73)):
        given = (q[:, :, :queries], k, v, dilated(30, 0, gap))
        found = block_sparse_attention(*given, query_offset=offset)
        close(found, block_sparse_reference(*given, query_offset=offset)[0])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_hooks_on_the_convolution_of_nystromformer_count(implementation):
    (layer,) = build_layers({"type": "nystromformer", "num_landmarks": 3})
    seen = []
    layer.conv.register_forward_hook(lambda module, given, output: seen.append(output.shape) or 2 * output)
    run_layers([layer], vectors(1, 9), make_context(9, implementation=implementation))
    assert seen == [(1, HEADS, 9, D)]


def test_long_texts_keep_no_map():
    layers = build_layers({"type": "lazyformer", "hand_on": "projections"}, 2, num_hidden_layers=2)
    for length in (600, 1200):
        largest = saved_sizes(lambda: run_layers(layers, vectors(1, length), make_context(length)))[0]
        assert largest <= length * 64
    auto = build_layers({"type": "lazyformer", "hand_on": "auto"}, 2, num_hidden_layers=2)[0]
    assert auto._keeps_weights(make_context(4), 1024, 1024) and not auto._keeps_weights(make_context(4), 1025, 1024)
