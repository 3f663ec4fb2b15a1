"""Pooling by hand, block lengths, and heads on pooled states."""

import pytest
import torch

from hf_xformers import (
    XFormerConfig,
    XFormerForCausalLM,
    XFormerForMaskedLM,
    XFormerForPreTraining,
    XFormerForQuestionAnswering,
    XFormerForSeq2SeqLM,
    XFormerForTokenClassification,
)
from hf_xformers.stacks.funnel import FunnelSpec
from hf_xformers.variants.funnel_transformer import (
    XFFunnelTransformerConfig,
    XFFunnelTransformerForMaskedLM,
    XFFunnelTransformerForSequenceClassification,
    XFFunnelTransformerModel,
)
from tests.attention.score_helpers import HEADS, WIDTH, small_blocks
from tests.helpers import close, gradients, make_strong, pad, tokens


def build(cls=XFFunnelTransformerModel, layers=3, stack=None, dtype=torch.float64, **fields):
    stack = {"type": "funnel", **(stack or {})}
    after = 0
    if stack["type"] == "funnel" and stack.get("upsample", True):
        after = stack.setdefault("decoder_layers", 2)
    config = XFFunnelTransformerConfig(
        **{
            "vocab_size": 99,
            "hidden_size": WIDTH,
            "num_attention_heads": HEADS,
            "num_hidden_layers": layers + after,
            "intermediate_size": 8,
            "pad_token_id": 0,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "stack": stack,
            **fields,
        }
    )
    torch.manual_seed(0)
    return make_strong(cls(config).to(dtype).eval(), amount=0.3)


def lengths(model, length):
    """Of the states after each layer."""
    with torch.no_grad():
        states = model(tokens(2, length), output_hidden_states=True).hidden_states
    return [state.shape[1] for state in states[1:]]


@pytest.mark.parametrize(
    "truncate,expected",
    [
        (True, {8: (8, 4, 2), 9: (9, 5, 3), 12: (12, 6, 3), 16: (16, 8, 4), 17: (17, 9, 5)}),
        (False, {8: (8, 5, 3), 9: (9, 5, 3), 12: (12, 7, 4), 16: (16, 9, 5), 17: (17, 9, 5)}),
    ],
)
def test_lengths(truncate, expected):
    model = build(stack={"truncate": truncate, "decoder_layers": 1})
    for length, blocks in expected.items():
        assert lengths(model, length) == [*blocks, length]
    for length in (1, 2, 3):
        assert lengths(model, length)[-1] == length


def pool_by_hand(states, real, spec):
    """One row, token by token: (pooled states, their number)."""
    rows = []
    for state, mask in zip(states, real):
        items = list(state[mask])
        if not items:
            rows.append([])
            continue
        head, rest = ([items[0]], items[1:]) if spec.separate_cls else ([], items)
        if spec.separate_cls and spec.truncate and rest:
            rest = rest[:-1]
        for begin in range(0, len(rest), 2):
            pair = torch.stack(rest[begin : begin + 2])
            head.append(pair.mean(0) if spec.pooling == "mean" else pair.amax(0))
        rows.append(head)
    return rows


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("separate_cls,truncate", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("length", [1, 2, 3, 6, 7])
def test_pooling(pooling, separate_cls, truncate, length):
    stack = build(stack={"pooling": pooling, "separate_cls": separate_cls, "truncate": truncate}).trunk.stack
    states = torch.randn(4, length, WIDTH, dtype=torch.float64)
    real = torch.arange(length)[None] < torch.tensor([length, max(length - 1, 0), length // 2, 0])[:, None]
    pooled, mask = stack.pool(states, real)
    for row, expected in enumerate(pool_by_hand(states, real, stack.spec)):
        assert mask[row].sum() == len(expected) and mask[row][: len(expected)].all()
        if expected:
            close(pooled[row][mask[row]], torch.stack(expected), 1e-12)
    whole, nothing = stack.pool(states, None)
    assert nothing is None
    close(whole[0], pooled[0], 1e-12)


def test_repeated_layers_share_weights():
    model = build(layers=2, stack={"block_sizes": (1, 1), "block_repeats": (1, 3), "decoder_layers": 1})
    assert len(model.trunk.layers) == 3 and model.config.stack.num_steps(model.config) == 5
    assert lengths(model, 9) == [9, 5, 5, 5, 9]


# ------------------------------------------------------------------------------------------------ pooled outputs


def test_blocks_equal_one_pass():
    model, ids = build(XFFunnelTransformerForMaskedLM), tokens(2, 15)
    expected = model(ids).logits
    slopes = gradients(model, expected)
    with small_blocks(2):
        found = model(ids).logits
        close(found, expected, 1e-12)
        for name, slope in gradients(model, found).items():
            close(slope, slopes[name], 1e-9)


@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_classification_of_pooled_states(pooling, side):
    """Without up-sampling: each row gets what it gets alone, and nothing is left without a gradient."""
    model = build(
        XFFunnelTransformerForSequenceClassification,
        stack={"upsample": False},
        classifier_pooling=pooling,
        num_labels=3,
    )
    rows = [tokens(13), tokens(6, seed=1), tokens(1, seed=2)]
    ids, mask = pad(rows, 13, side, seed=4)
    logits = model(ids, attention_mask=mask).logits
    close(logits, torch.cat([model(row[None]).logits for row in rows]), 1e-10)
    if (
        pooling == "mean"
    ):  # the first token has no position, so alone it teaches the last layer's position terms nothing
        assert all(s.abs().max() > 0 for name, s in gradients(model, logits).items() if "k_proj.bias" not in name)
    assert model.model(ids, attention_mask=mask).last_hidden_state.shape[1] == 4


def test_encoder_of_two_towers():
    """A decoder reads pooled states under their own mask."""
    config = XFormerConfig(
        vocab_size=99,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=8,
        position="none",
        attention={"type": "transformer_xl", "share_biases": False},
        stack={"type": "funnel", "upsample": False},
        decoder={"stack": "plain", "attention": "dense"},
        is_encoder_decoder=True,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = make_strong(XFormerForSeq2SeqLM(config).double().eval())
    target = tokens(2, 5, seed=3)
    ids, mask = pad([tokens(9), tokens(4, seed=1)], 9, "left", seed=5)
    with torch.no_grad():
        found = model(ids, attention_mask=mask, decoder_input_ids=target).logits
        for row, length in enumerate((9, 4)):
            alone = model(ids[row : row + 1, 9 - length :], decoder_input_ids=target[row : row + 1]).logits
            close(found[row : row + 1], alone, 1e-10)
            full = torch.ones(1, length, dtype=torch.long)
            again = model(
                ids[row : row + 1, 9 - length :], attention_mask=full, decoder_input_ids=target[row : row + 1]
            )
            close(again.logits, alone, 1e-12)


def test_refusals():
    base = {"attention": "transformer_xl", "position": "none", "num_hidden_layers": 3}
    with pytest.raises(ValueError, match="cannot stand in a decoder"):
        XFormerForCausalLM(XFormerConfig(**base, stack="funnel"))
    with pytest.raises(ValueError, match="one document per row"):
        build()(tokens(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]))
    assert FunnelSpec().blocks(XFFunnelTransformerConfig()) == (4, 4, 4)
    assert [FunnelSpec().blocks(XFormerConfig(num_hidden_layers=n)) for n in (1, 2, 4, 6)] == [
        (1,),
        (1, 1),
        (1, 1, 1),
        (2, 1, 1),
    ]


@pytest.mark.parametrize(
    "model_class",
    [XFormerForMaskedLM, XFormerForTokenClassification, XFormerForQuestionAnswering, XFormerForPreTraining],
)
def test_heads_of_tokens_need_the_text_s_length(model_class):
    fields = dict(position="none", attention={"type": "transformer_xl", "share_biases": False})
    config = XFormerConfig(hidden_size=WIDTH, num_attention_heads=HEADS, stack={"type": "funnel"}, **fields)
    model_class(config)
    config.stack = {"type": "funnel", "upsample": False}
    with pytest.raises(
        ValueError, match=f'{model_class.__name__} predicts something for every token, but .* "upsample": '
    ):
        model_class(config)
