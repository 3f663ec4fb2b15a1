"""Every position with every attention in every shape: it works, or the config refuses it in the documented sentence.

Each cell's config is built. A cell that works passes forward, backward, padding, and (with a causal tower) decoding
with a cache: of each row a part of the mechanisms, other ones from row to row. The mixes draw further pairs.
"""

import re

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.core.components import names
from hf_xformers.variants import family
from tests.common.cases import FLAGS, SHAPES
from tests.helpers import close, make_strong, pad, tokens

SIZES = dict(
    vocab_size=99,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
ROWS = {name: {"position": name} for name in names("position")}
ROWS["per_layer_sinusoids"] = {
    "position": {"type": "per_layer_position", "source": "sinusoidal", "depth_signal": True}
}
ROWS["tupe_absolute"] = {"position": {"type": "tupe", "relative": False}}
ROWS["deberta_v2"] = {"position": {"type": "deberta", "buckets": 4, "share_projections": True, "normalize": True}}
ROWS["etc_relative"] = {"position": "etc_relative", "stack": "etc"}
ROWS["cpe"] = {"position": "none", "block": "cpe"}
ROWS["r_transformer"] = {"position": "none", "block": "r_transformer"}
ATTENTIONS = names("attention")
WITH_ALL = "learned_absolute"

# Why a cell may be refused. What a mechanism says about itself names it.
REFUSALS = (
    (
        r"position '\w+' adds a bias to attention scores, which attention '\w+' has no place for; use an input-level"
        r" position"
    ),
    r"position '\w+' rotates queries and keys, which attention '\w+' has no place for; use an input-level position",
    (
        r"position '\w+' adds terms of queries and keys to attention scores, which attention '\w+' has no place for;"
        r" use an"
    ),
    (
        r"position '\w+' adds to the queries, keys and values of every layer, which attention '\w+' has no place for;"
        r" use an"
    ),
    r"position '\w+' only works in a causal decoder",
    r"position '\w+' .*only works in an encoder",
    r"position '\w+' keeps a number for each token next to its key, which attention '\w+' has no place for",
    r"attention '\w+' has no causal form and cannot stand in a decoder",
    r"attention '\w+' is causal only and cannot stand in an encoder",
    r"The stack 'etc' (reads the whole text and cannot stand in a decoder|needs attention that takes any number of)",
    r"block '\w+' keeps a window of inputs besides the keys and values of attention 'dense'",
)


def refused(row, attention, shape):
    """The config, or the sentence that refuses it."""
    try:
        return XFormerConfig(**{**SIZES, **ROWS[row], "attention": attention, **FLAGS[shape]})
    except ValueError as error:
        return str(error)


def known(sentence, attention):
    """Whether a refusal is one of the documented ones, or what this mechanism says about itself."""
    if any(re.search(pattern, sentence) for pattern in REFUSALS):
        return True
    return re.search(rf"\b{attention}\b", sentence) is not None


def to_run(row, shape, configs):
    """Which of the cells that work are run. To attention, positions that act at the input alone are vectors like any
    others, as one of them shows with every mechanism; and an encoder-decoder is made of towers that are run by
    themselves. Of the former every twelfth mechanism is run, of these every fourth, of others every second, other ones
    from row to row."""
    acts = frozenset().union(*(config.position.acts for config in configs.values()))
    if row == WITH_ALL:
        return configs
    apart = 12 if acts <= {"input", "layer_input"} else 4 if shape == "seq2seq" else 2
    few = list(configs)[list(ROWS).index(row) % max(1, min(apart, len(configs))) :: apart]
    return {attention: configs[attention] for attention in few}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("row", ROWS)
def test_row(row, shape):
    working, wrong = {}, []
    for attention in ATTENTIONS:
        config = refused(row, attention, shape)
        if isinstance(config, str):
            if not known(config, attention):
                wrong.append(f"{attention}: refused by {config}")
        else:
            working[attention] = config
    for attention, config in to_run(row, shape, working).items():
        try:
            check(config, shape)
        except Exception as error:
            wrong.append(f"{attention}: {type(error).__name__}: {' '.join(str(error).split())}")
    assert not wrong, "\n".join(wrong)
    decoders_only = shape != "decoder" and row in ("music_transformer", "indigo", "forget_gate")
    encoders_only = shape != "encoder" and row in ("graphormer", "etc_relative")
    assert (not working) == (decoders_only or encoders_only)


def check(config, shape):
    torch.manual_seed(0)
    model = make_strong(family("xformer")[SHAPES[shape]](config).double().eval(), amount=0.2)

    def run(ids, mask=None, **more):
        if shape == "seq2seq":
            more = {"decoder_input_ids": ids, "decoder_attention_mask": mask, **more}
        return model(input_ids=ids, attention_mask=mask, **more).logits

    texts = [tokens(7), tokens(3, seed=1)]
    ids, mask = pad(texts, 7, "left", seed=2)
    output = run(ids, mask, use_cache=False)
    assert output.isfinite().all()
    loss = output[mask.bool()].square().sum()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        close(output[1, 4:], run(texts[1][None], use_cache=False)[0])
        if shape == "encoder" or "generate" in config.attention.why_not:
            return
        memory = model.get_encoder()(input_ids=ids, attention_mask=mask) if shape == "seq2seq" else None
        cache, found = None, []
        for begin, end in ((0, 5), (5, 6), (6, 7)):
            given = {"past_key_values": cache, "use_cache": True}
            if memory is None:
                step = model(input_ids=ids[:, begin:end], attention_mask=mask[:, :end], **given)
            else:
                given.update(encoder_outputs=memory, attention_mask=mask, decoder_attention_mask=mask[:, :end])
                step = model(decoder_input_ids=ids[:, begin:end], **given)
            cache = step.past_key_values
            found.append(step.logits)
        close(torch.cat(found, dim=1)[mask.bool()], output[mask.bool()])
