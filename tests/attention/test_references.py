"""Every mechanism against its literal equation, on every path and in every form it has.

The equations stand in `references/`, each for one text alone in float64. Here they meet padding on either side, rows
of padding alone, causal order, a memory, positions' terms, packed rows, caches, half precision and compilation.
"""

import functools
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.attention import adaptive_span
from hf_xformers.attention.adaptive_span import AdaptiveSpanAttention
from hf_xformers.attention.realformer import RealFormerAttention
from hf_xformers.core.components import build_spec
from hf_xformers.ops import chosen_blocks, entmax_attention
from hf_xformers.ops.score_terms import window as window_attention
from hf_xformers.position.base import CallBias, Turns
from hf_xformers.position.rotary import RotaryPosition, RotarySpec
from hf_xformers.position.t5_relative_bias import T5RelativeBias, T5RelativeBiasSpec
from tests.attention.references import COMPILED, REFERENCES, TRACED
from tests.attention.references.table import turned
from tests.attention.score_helpers import (
    GEOMETRY,
    build_layers,
    in_pieces,
    make_context,
    positions_of,
    run_layers,
    small_blocks,
    state_size,
    vectors,
)
from tests.helpers import close, tokens

# ------------------------------------------------------------------------------------------- paths


def _set(*changes):
    patch = pytest.MonkeyPatch()
    for target, name, value in changes:
        patch.setattr(target, name, value)
    return patch


@contextmanager
def path(name):
    """What a call's context says on a path, of which some need small sizes to be taken by short texts."""
    span = [(adaptive_span, "TRIM", 2), (window_attention, "_ROWS", 2), (window_attention, "_SCORES", 20)]
    changes = {
        "groups": [(chosen_blocks, "FEW_QUERIES", 0), (chosen_blocks, "TILE_ROWS", 2)],
        "span_tiles": span,
        "span_blocks": [*span, (AdaptiveSpanAttention, "_tiles_apply", lambda *_: False)],
        "entmax_tiles": [(entmax_attention, "WORTH_A_TILE", 0), (entmax_attention, "LEAST_ROWS", 1)],
        "realformer_projections": [
            (RealFormerAttention, "_hands_on_scores", lambda self, context, *_: self.wants_weights(context))
        ],
    }
    with ExitStack() as stack:
        patch = _set(*changes.get(name, ()))
        stack.callback(patch.undo)
        if name == "blocks" or name.startswith("span"):
            stack.enter_context(small_blocks(2 if name.startswith("span") else 3))
        yield {"implementation": "eager" if name == "eager" else "sdpa"}


# ------------------------------------------------------------------------------------------- texts

LENGTH = 13
# The whole row, padding behind a text, before it, and nothing else.
MASK = torch.ones(4, LENGTH, dtype=torch.bool)
MASK[1, 9:], MASK[2, :3], MASK[3] = False, False, False
SEEN = torch.ones(4, 9, dtype=torch.bool)  # the same of a memory
SEEN[0, 5:], SEEN[1, :4], SEEN[3] = False, False, False


def built(name, causal=False, cross=False, **fields):
    """The layers that run, one or a chain, with all their parameters and buffers set."""
    reference = REFERENCES[name]
    fields = {**reference.fields, **fields}
    if cross:
        fields = {**fields, "is_encoder_decoder": True, **(reference.cross if reference.cross is not True else {})}
    count = max(reference.layers, reference.layer_idx + 1)
    layers = build_layers(reference.spec, count, causal, cross, reference.strong, **fields)
    with torch.no_grad():
        for layer in layers if reference.prepare else ():
            reference.prepare(layer)
    return layers if reference.chain else [layers[reference.layer_idx]]


def pairs_of(found):
    return found if isinstance(found, tuple) else (found, None)


@torch.no_grad()
def by_equation(name, layers, x, memory=None, causal=False, **more):
    """(output, weights) of each layer for one text."""
    reference = REFERENCES[name]
    if reference.chain:
        return [pairs_of(each) for each in reference.equation(layers, x, memory, causal, **more)]
    return [pairs_of(reference.equation(layers[0], x, memory, causal, **more))]


def check_rows(expected, results, mask, where, tolerance, seen=None, weights=True):
    """The results of layers on a batch against those of its texts. expected: by row, None of an empty one."""
    for number, result in enumerate(results):
        for row, of_text in enumerate(expected):
            if of_text is None:
                assert result.output[row].isfinite().all(), where
                continue
            real, note = mask[row], f"{where}, row {row}, layer {number}: "
            torch.testing.assert_close(
                result.output[row, real].detach(), of_text[number][0][0], rtol=tolerance, atol=tolerance,
                msg=lambda text, note=note: note + text,
            )  # fmt: skip
            if where == "eager" and weights:  # a path that gives none would not be looked at
                assert (result.weights is None) == (of_text[number][1] is None), f"{note}weights"
            if result.weights is not None and of_text[number][1] is not None and weights:
                keys = real if seen is None else seen[row]
                torch.testing.assert_close(
                    result.weights[row][:, real][:, :, keys].detach(), of_text[number][1][0], rtol=tolerance,
                    atol=tolerance, msg=lambda text, note=note: note + "weights: " + text,
                )  # fmt: skip


@functools.cache
def of_texts(name, causal):
    """What the equation gives for each row of the padded batch, and for the batch without padding."""
    layers, states = built(name, causal), vectors(4, LENGTH)
    return {
        padded: [
            by_equation(name, layers, states[row : row + 1, real], None, causal) if real.any() else None
            for row, real in enumerate(MASK if padded else MASK[:2] | True)
        ]
        for padded in (False, True)
    }


def forms(select=lambda reference: True, **only):
    """(name, causal) of the rows that are selected."""
    return pytest.mark.parametrize(
        ("name", "causal"),
        [
            pytest.param(name, causal, id=f"{name}-{'decoder' if causal else 'encoder'}")
            for name, reference in REFERENCES.items()
            if select(reference)
            for causal in only.get("causal", reference.causal)
            if causal in reference.causal
        ],
    )


def names(select):
    return pytest.mark.parametrize("name", [name for name, reference in REFERENCES.items() if select(reference)])


# ------------------------------------------------------------------------------------------- tests


@torch.no_grad()
def along(function, inputs, slopes, step=1e-6):
    """The derivative in a random direction of all inputs, by the gradients and by a difference of two results."""
    ways = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) for x in inputs]
    results = []
    for sign in (1, -1):
        for x, way in zip(inputs, ways, strict=True):
            x.add_(way, alpha=sign * step)
        results.append(function())
        for x, way in zip(inputs, ways, strict=True):
            x.sub_(way, alpha=sign * step)
    expected = (results[0] - results[1]) / (2 * step)
    return sum((slope * way).sum() for slope, way in zip(slopes, ways) if slope is not None), expected


@forms()
def test_equation(name, causal):
    """Outputs and weights on every path, of padded and whole rows and of single tokens; gradients by states and by
    every parameter are those of differences, the same on all paths, and hold no padding."""
    reference, layers, states = REFERENCES[name], built(name, causal), vectors(4, LENGTH)
    parameters = [p for layer in layers for p in layer.parameters()]
    single = by_equation(name, layers, states[:1, :1], None, causal)
    # Denominators near zero are steep, spans have a bend where they stop, a guard counts from a scale that is taken as
    # given: `test_adaptive_span.py` and `tests/ops` have those gradients.
    smooth = reference.rounds and not hasattr(layers[0], "span") and name != "performer guarded"
    slopes, empty = {}, {}
    for each in reference.paths:
        with path(each) as how:
            context = make_context(LENGTH, causal, padding_mask=MASK, positions=positions_of(MASK), **how)
            given = states.clone().requires_grad_()
            results = run_layers(layers, given, context)
            check_rows(of_texts(name, causal)[True], results, MASK, each, reference.tolerance, None, reference.weights)
            empty[each] = results[0].output[3].detach()
            loss = results[-1].output[MASK].sin().sum()
            slopes[each] = torch.autograd.grad(loss, [given, *parameters], allow_unused=True)
            if each == reference.paths[0] and smooth:
                sums = lambda: run_layers(layers, given, context)[-1].output[MASK].sin().sum()  # noqa: E731
                close(*along(sums, [given, *parameters], slopes[each]), 1e-5)
            with torch.no_grad():
                whole = run_layers(layers, states[:2], make_context(LENGTH, causal, **how))
                check_rows(
                    of_texts(name, causal)[False], whole, MASK[:2] | True, f"{each}, whole", reference.tolerance
                )
                one = run_layers(layers, states[:1, :1], make_context(1, causal, **how))
                check_rows([single], one, MASK[:1, :1], f"{each}, one token", reference.tolerance)
    first, *others = reference.paths
    for other in others:
        close(empty[other], empty[first])
        for found, expected in zip(slopes[other], slopes[first], strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                assert found.isfinite().all()
                close(found, expected, 1e-7)
    assert (slopes[first][0][~MASK] == 0).all()


@names(lambda reference: reference.cross)
def test_cross_attention(name):
    """A padded memory, read by padded queries; with a cache, what has been made of it is used again."""
    reference, layers = REFERENCES[name], built(name, cross=True)
    states, memory, mask = vectors(4, 6), vectors(4, 9, seed=1), MASK[:, [0, 3, 5, 8, 9, 12]]
    expected = [
        by_equation(name, layers, states[row : row + 1, mask[row]], memory[row : row + 1, SEEN[row]])
        if SEEN[row].any() else None
        for row in range(4)
    ]  # fmt: skip
    empty = {}
    for each in reference.paths:
        with path(each) as how, torch.no_grad():
            where = {"padding_mask": mask, "memory_padding_mask": SEEN, "positions": positions_of(mask), **how}
            results = run_layers(layers, states, make_context(6, True, **where), memory)
            check_rows(expected, results, mask, each, reference.tolerance, SEEN, reference.weights)
            empty[each] = results[0].output[3]
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            # What keeps more than the memory's keys and values, and is built with more, goes on with it.
            reads = (memory, torch.zeros_like(memory)) if each != "eager" and reference.cross is True else ()
            for read in reads:
                again = run_layers(layers, states, make_context(6, True, **where), read, cache)
                check_rows(expected, again, mask, f"{each}, cached", reference.tolerance, SEEN)
    for other in reference.paths[1:]:
        close(empty[other], empty[reference.paths[0]])


@names(lambda reference: True in reference.causal and reference.cached)
def test_decoding(name):
    """Token by token and in pieces as the whole text, with padding before it; a recurrent state does not grow."""
    reference, layers, states = REFERENCES[name], built(name, True), vectors(4, LENGTH)
    with torch.no_grad():
        for padded in (False, True):
            rows, sizes = ([0, 2], {}) if padded else ([0, 1], {})
            expected = of_texts(name, True)[padded]
            mask = MASK[rows] if padded else None
            for pieces in ((1,) * LENGTH, (5, 1, 1, 6), (LENGTH,)):
                with small_blocks(3):
                    found, cache = in_pieces(layers, states[rows], mask, pieces)
                for at, row in enumerate(rows):
                    real = torch.ones(LENGTH, dtype=torch.bool) if mask is None else mask[at]
                    close(found[at, real], expected[row][-1][0][0], reference.tolerance)
                sizes[pieces] = state_size(cache)
        if reference.steady:
            _, short = in_pieces(layers, states[[0, 2], :12], MASK[[0, 2], :12], (5, 1, 6))
            assert set(sizes.values()) == {state_size(short)}


@names(lambda reference: True in reference.causal)
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_no_future(name, training):
    """Outputs before changed tokens, which are enormous, stay the same to the last bits, in training (with the same
    random numbers) as well."""
    reference = REFERENCES[name]
    if getattr(reference.spec, "get", {}.get)("causal_form") == "paper" or (training and reference.draws):
        pytest.skip("the paper's form reads what is later, or passes draw anew")
    layers, states = [layer.train(training) for layer in built(name, True)], vectors(2, LENGTH)

    @torch.no_grad()
    def run(x):
        torch.manual_seed(0)
        return run_layers(layers, x, make_context(LENGTH, True))[-1].output

    expected = run(states)
    for place in (1, 6, 12):
        changed = states.clone()
        changed[:, place:] = 30 * vectors(2, LENGTH - place, seed=place)
        found = run(changed)
        close(found[:, :place], expected[:, :place], 1e-12)
        assert (found[:, place:] - expected[:, place:]).abs().max() > 1e-6


@forms(lambda reference: reference.rounds)
def test_half_precision(name, causal):
    """float32 as near as it can be; bfloat16 keeps its type, and its error is that of rounded numbers."""
    reference, mask = REFERENCES[name], MASK[:3]
    expected = torch.cat([of_text[-1][0][0] for of_text in of_texts(name, causal)[True][:3]])
    for dtype in (torch.float32, torch.bfloat16):
        for each in reference.paths:
            layers = [layer.to(dtype) for layer in built(name, causal)]
            with path(each) as how, torch.no_grad():
                context = make_context(LENGTH, causal, padding_mask=mask, positions=positions_of(mask), **how)
                found = run_layers(layers, vectors(4, LENGTH)[:3].to(dtype), context)[-1].output
            assert found.dtype == dtype and found.isfinite().all()
            error = (found[mask].double() - expected) / expected.std()
            if dtype == torch.float32:
                assert error.abs().max() < 1e-4, each
            else:
                assert error.abs().mean() < 0.03, each


@forms(lambda reference: reference.bias)
def test_position_bias(name, causal):
    """What a position adds to scores, by distance, and its gradient on every path."""
    reference, layers, states = REFERENCES[name], built(name, causal), vectors(4, LENGTH)
    position = T5RelativeBias(XFormerConfig(**GEOMETRY), T5RelativeBiasSpec(num_buckets=8, max_distance=10)).double()
    torch.nn.init.normal_(position.table.weight)
    expected = []
    for row, real in enumerate(MASK):
        place = torch.arange(int(real.sum()))
        bias = position.block(place, place).detach()
        text = states[row : row + 1, real]
        expected.append(by_equation(name, layers, text, None, causal, bias=bias) if real.any() else None)
    slopes = []
    for each in reference.paths:
        with path(each) as how:
            context = make_context(LENGTH, causal, padding_mask=MASK, **how)
            context.keep(CallBias(position))
            results = run_layers(layers, states, context)
            check_rows(expected, results, MASK, each, reference.tolerance)
            slopes.append(torch.autograd.grad(results[-1].output[MASK].sin().sum(), position.table.weight)[0])
    for other in slopes[1:]:
        close(other, slopes[0], 1e-8)


@forms(lambda reference: reference.turns)
def test_rotation(name, causal):
    """Each position's angles written out; as float32 has them."""
    reference, layers, states = REFERENCES[name], built(name, causal), vectors(4, LENGTH)
    width, turn = layers[0].head_dim, partial(turned, theta=50.0)
    expected = [
        by_equation(name, layers, states[row : row + 1, real], None, causal, turn=turn) if real.any() else None
        for row, real in enumerate(MASK)
    ]
    for each in reference.paths:
        with path(each) as how, torch.no_grad():
            context = make_context(LENGTH, causal, padding_mask=MASK, **how)
            rotary = RotaryPosition(width, RotarySpec(theta=50.0))
            context.keep(Turns(*[rotary.rotation(positions_of(MASK), states)] * 2), "global")
            check_rows(expected, run_layers(layers, states, context), MASK, each, 3e-5)


def supports(reference, what):
    return what in build_spec("attention", reference.spec).supports


@forms(lambda reference: not reference.chain and supports(reference, "packed_rows"))
def test_packed_documents(name, causal):
    """Documents of one row do not read one another."""
    reference, layers, states = REFERENCES[name], built(name, causal), vectors(2, LENGTH)
    lengths = ((4, 1, 8), (6, 5, 2))
    segments = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(each)) for each in lengths])
    expected = [
        torch.cat([
            by_equation(name, layers, text, None, causal)[0][0]
            for text in states[row : row + 1].split(each, 1)
        ], 1)
        for row, each in enumerate(lengths)
    ]  # fmt: skip
    for one in reference.paths:
        with path(one) as how, torch.no_grad():
            context = make_context(LENGTH, causal, segment_ids=segments, **how)
            close(run_layers(layers, states, context)[0].output, torch.cat(expected), reference.tolerance)


def reads_pairs(reference):
    """Where a mask of pairs says all: it does not tell where a text ends, which BigBird's last block has to know."""
    is_bigbird = build_spec("attention", reference.spec).type == "bigbird"
    return not reference.chain and supports(reference, "pair_mask") and not is_bigbird


@forms(reads_pairs)
def test_prepared_masks(name, causal):
    """A 4-D mask of padding and order, boolean or added to scores, says the same as the padding itself."""
    reference, layers, states = REFERENCES[name], built(name, causal), vectors(4, LENGTH)
    pairs = MASK[:, None, None, :].expand(-1, 1, LENGTH, -1)
    pairs = pairs & torch.ones(LENGTH, LENGTH).tril().bool() if causal else pairs
    added = torch.zeros(pairs.shape, dtype=torch.float64).masked_fill(~pairs, torch.finfo(torch.float64).min)
    for mask in (pairs, added):
        for each in reference.paths:
            with path(each) as how, torch.no_grad():
                context = make_context(LENGTH, causal, explicit_mask=mask, positions=positions_of(MASK), **how)
                results = run_layers(layers, states, context)
                check_rows(of_texts(name, causal)[True][:3], results, MASK, each, reference.tolerance, weights=False)


@pytest.mark.parametrize("name", ["dense", "adaptive_span engine itself", "adaptive_span itself", "realformer",
                                  "synthesizer dense", "synthesizer random", "talking_heads"])  # fmt: skip
def test_dropout_acts_on_weights(name):
    """Every row has draws of its own, whose mean is the output without dropout."""
    layers = [layer.train() for layer in built(name, attention_probs_dropout_prob=0.5)[:1]]
    states = vectors(1, 6).expand(2, -1, -1)
    for each in REFERENCES[name].paths:
        with path(each) as how, torch.no_grad():
            torch.manual_seed(0)
            draws = torch.stack([run_layers(layers, states, make_context(6, **how))[0].output for _ in range(300)])
        assert (draws[0, 0] - draws[0, 1]).abs().max() > 1e-3
        expected = by_equation(name, layers, states[:1])[0][0]
        assert ((draws.mean(0) - expected).abs() < 5 * draws.std(0) / 300**0.5 + 1e-12).all()


@names(lambda reference: True)
def test_model(name):
    """In a model: every number is set at the start, and padding between tokens counts as little as on their sides."""
    reference = REFERENCES[name]
    causal = reference.causal[-1]
    fields = {**GEOMETRY, "position": "none", "is_decoder": causal, **reference.fields}
    torch.use_deterministic_algorithms(True)  # memory that nobody has set holds NaN
    try:
        torch.manual_seed(0)
        model = XFormerModel(XFormerConfig(**fields, attention=reference.spec)).double().eval()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    ids, mask = tokens(2, LENGTH, low=5, high=50), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, [0, 3, 4, 9]], mask[1, 5:8] = 0, 0
    with torch.no_grad():
        found = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        for row, real in enumerate(mask.bool()):
            alone = model(ids[row : row + 1, real], use_cache=False).last_hidden_state[0]
            close(found[row, real], alone, 1e-8)


def compilable(name, causal):
    """The first layer, and a function of states [2, 9, D], of which four are padding."""
    mask = MASK[[0, 1], :9].clone()
    mask[1, 5:] = False
    layers = torch.nn.ModuleList(built(name, causal)[:1])

    def run(x):
        context = make_context(9, causal, padding_mask=mask, positions=positions_of(mask))
        return run_layers(layers, x, context)[-1].output[:, :5]

    return layers, run


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    with small_blocks(5):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name, fresh_compiler):
    """One graph of both passes, with padding."""
    layers, run = compilable(name, COMPILED[name])
    found = []
    for function in (torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False), run):
        given = vectors(2, 9).requires_grad_()
        output = function(given)
        parameters = [given, *layers.parameters()]
        slopes = torch.autograd.grad(output.sin().sum(), parameters, allow_unused=True)
        found.append([output, *(slope for slope in slopes if slope is not None)])
    for one, other in zip(*found, strict=True):
        close(one, other, 1e-8)


@pytest.mark.parametrize("name", TRACED)
@torch.no_grad()
def test_traced(name, fresh_compiler):
    _, run = compilable(name, TRACED[name])
    close(torch.compile(run, backend="eager", fullgraph=True, dynamic=False)(vectors(2, 9)), run(vectors(2, 9)))
