"""BigBird: its draws, transformers' sparse form, and the extended form with global tokens."""

import copy

import numpy
import pytest
import torch
from transformers import BigBirdConfig, BigBirdModel
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.variants.bigbird import XFBigBirdConfig, XFBigBirdModel
from tests.attention.references.patterns import drawn_blocks
from tests.attention.references.table import softmax_attention
from tests.attention.score_helpers import GEOMETRY, build_layers, make_context, run_layers, vectors
from tests.helpers import close, make_strong, tokens
from tests.weight_copy import take_bert_weights

SPEC = {"type": "bigbird", "block_size": 2, "num_random_blocks": 2}
SMALL = {**GEOMETRY, "num_hidden_layers": 2, "max_position_embeddings": 40}
LONG = {"max_position_embeddings": 40}


def test_draws():
    """Texts of every length have as many; distinct, outside window and global blocks, different by layer and head, the
    same after a copy and a reload."""
    first, second = build_layers(SPEC, 2, **LONG)
    for layer in (first, second):
        for count in (3, 6, 7, 13, 20):
            for table in drawn_blocks(layer, count):
                for row, blocks in enumerate(table):
                    legal = [block for block in range(1, count - 1) if abs(block - row) > 1]
                    found = [block for block in blocks if block >= 0]
                    assert len(set(found)) == len(found) == min(2, len(legal)) and set(found) <= set(legal)
    assert drawn_blocks(first, 20) != drawn_blocks(second, 20)
    assert drawn_blocks(first, 20)[0] != drawn_blocks(first, 20)[1]
    assert copy.deepcopy(first).pattern == first.pattern
    other = build_layers({**SPEC, "random_seed": 1}, 1, **LONG)[0]
    assert drawn_blocks(other, 20) != drawn_blocks(first, 20)


# ------------------------------------------------------------------------------------------------ transformers'


def pair(kind, blocks=1):
    """transformers' BigBird and ours with its weights."""
    theirs = BigBirdConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=40,
        attention_type=kind,
        block_size=2,
        num_random_blocks=blocks,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    reference = make_strong(BigBirdModel(theirs, add_pooling_layer=False).double().eval(), amount=0.2)
    config = XFBigBirdConfig(
        **{**SMALL, "intermediate_size": 24}, attention={**SPEC, "num_random_blocks": blocks, "attention_type": kind}
    )
    ours = XFBigBirdModel(config).double().eval()
    take_bert_weights(ours, reference)
    return reference, ours


def test_parity_with_transformers_sparse(monkeypatch):
    """With our random blocks on both sides. Theirs are drawn only in training mode; in evaluation they are block 0 for
    all."""
    reference, ours = pair("block_sparse")
    length = 32
    draws = [numpy.array(drawn_blocks(layer.attention, length // 2)) for layer in ours.trunk.layers]
    order = iter(draws)
    monkeypatch.setattr(
        BigBirdBlockSparseAttention, "_bigbird_block_rand_mask_with_head", lambda *_, **__: list(next(order)[:, 1:-1])
    )
    reference.train()
    ids, mask = tokens(2, length, high=50), torch.ones(2, length, dtype=torch.long)
    mask[1, -1] = 0  # inside the last block, which is global for both
    with torch.no_grad():
        expected = reference(ids, attention_mask=mask).last_hidden_state
        for implementation in ("sdpa", "eager"):
            ours.set_attn_implementation(implementation)
            found = ours(ids, attention_mask=mask).last_hidden_state
            close(found[mask.bool()], expected[mask.bool()], 2e-6)


def test_the_internal_form_takes_no_global_tokens():
    model, ids = XFormerForMaskedLM(XFormerConfig(**SMALL, attention=SPEC)), tokens(1, 9, high=50)
    with pytest.raises(TypeError, match="No component .* reads the argument `global_attention_mask`"):
        model(ids, global_attention_mask=torch.ones_like(ids))


# ------------------------------------------------------------------------------------------------ the extended form

ETC = {
    "attention": {**SPEC, "global_mode": "etc", "num_random_blocks": 0},
    "stack": {"type": "global_tokens", "num_global_tokens": 3},
}


def test_extended_form():
    """A layer with global tokens behind the text: the text reads its window and them, they read everything."""
    (layer,) = build_layers(ETC["attention"], stack=ETC["stack"])
    length, count = 11, 3

    place = torch.arange(length + count)
    globals_, near = place >= length, (place[:, None] // 2 - place // 2).abs() <= 1
    states = vectors(2, length + count)
    chosen = torch.zeros(2, length + count, dtype=torch.bool)
    chosen[:, length:] = True
    expected = softmax_attention(layer, states, allowed=globals_[:, None] | globals_ | near)[0].detach()
    for implementation in ("sdpa", "eager"):
        inputs = {"global_attention_mask": chosen}
        context = make_context(length + count, implementation=implementation, inputs=inputs)
        close(run_layers([layer], states, context)[0].output.detach(), expected)


def test_global_tokens_in_dense_attention():
    """There they are further tokens: appending them by hand gives the same."""
    torch.manual_seed(0)
    fields = {**SMALL, "position": "none", "hidden_dropout_prob": 0.0}
    model = XFormerConfig(**fields, stack=ETC["stack"])
    model = make_strong(XFormerForMaskedLM(model).double().eval(), amount=0.3)
    plain = XFormerForMaskedLM(XFormerConfig(**fields)).double().eval()
    plain.load_state_dict({name: one for name, one in model.state_dict().items() if "stack" not in name})
    embeds = model.get_input_embeddings()(tokens(2, 7, high=50)).detach()
    longer = torch.cat([embeds, model.model.trunk.stack.tokens.expand(2, -1, -1)], 1)
    with torch.no_grad():
        close(model(inputs_embeds=embeds).logits, plain(inputs_embeds=longer).logits[:, :7])
