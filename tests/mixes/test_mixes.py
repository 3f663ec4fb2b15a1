"""Mixes are refused in one sentence or work: those of a seed, and those that once did neither."""

import re

import pytest

from tests.mixes.check import check
from tests.mixes.draw import FLAGS, GEOMETRY, Mix, draw
from tests.mixes.shrink import shrink

COUNT, AT_ONCE = 3000, 250  # about a minute


def mix_of(shape, head, /, **fields):
    return Mix(shape, head, {**GEOMETRY, **FLAGS[shape], **fields})


@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_drawn_mixes(first):
    """A longer run by hand: `python -m tests.mixes --count 10000`."""
    kinds = []
    for seed in range(first, first + AT_ONCE):
        mix = draw(seed)
        outcome = check(mix)
        kinds.append(outcome.kind)
        if outcome.third:
            pytest.fail(f"[{seed}] {outcome.kind}: {outcome.detail}\n{shrink(mix, outcome, check).line()}")
    assert kinds.count("works") > AT_ONCE // 8  # or there would be nothing to see


def test_drawing_is_seeded():
    assert draw(3) == draw(3) != draw(4)


RELATIVE = ("deberta", "tupe", "shaw_relative", "t5_relative_bias", "learnable_sinusoidal_relative")
GLOBAL = {"type": "global_tokens", "num_global_tokens": 2}
LEAVING = {
    **{position: {"position": position} for position in ("deberta", "tupe", "floater", "t5_relative_bias")},
    "adaptive_span": {"attention": {"type": "adaptive_span", "max_span": 8}},
    "transformer_xl": {"attention": "transformer_xl"},
    "realformer": {"attention": {"type": "realformer", "mean": True}},
    "luna": {"attention": {"type": "luna", "projected_length": 4}},
    "linformer": {"attention": {"type": "linformer", "sharing": "layerwise"}},
}


def masked(**fields):
    return ("encoder", "ForMaskedLM", fields)


WORKS = {
    **{
        f"reversible layers train {position}": masked(stack="reversible", residual="pre_ln", position=position)
        for position in RELATIVE
    },
    **{
        f"reversible layers train the table of {attention}": masked(
            stack="reversible", residual="pre_ln", position="t5_relative_bias", attention=attention
        )
        for attention in ("longformer", "reformer", "routing_transformer", "sparse_transformer", "talking_heads")
    },
    **{f"padding behind global tokens, {position}": masked(stack=GLOBAL, position=position) for position in RELATIVE},
    **{
        f"padding behind global tokens, {block}": masked(stack=GLOBAL, block=block)
        for block in ("cpe", "r_transformer")
    },
    **{
        f"texts leave early at {threshold}, {name}": (
            "encoder",
            "ForSequenceClassification",
            {"stack": {"type": "entropy_exit", "threshold": threshold}, "num_hidden_layers": 3, **fields},
        )
        for name, fields in LEAVING.items()
        for threshold in (0.2, 0.5)
    },
    "global tokens beside those of a task": (
        "encoder",
        "ForSequenceClassification",
        dict(
            stack={"type": "global_tokens", "num_global_tokens": 2},
            attention={"type": "longformer", "attention_window": 4},
        ),
    ),
    "norms by layer, the last one's at the end": (
        "decoder",
        "ForCausalLM",
        dict(residual="pre_ln", per_layer_config={1: {"normalization": "rms_norm", "layer_norm_eps": 1e-3}}),
    ),
    "norms by layer, the embedding's and the head's too": (
        "encoder",
        "ForMaskedLM",
        dict(
            embedding={"type": "factorized", "width": 8},
            head="transform",
            position="tupe",
            per_layer_config={1: {"layer_norm_eps": 1e-3}},
        ),
    ),
    "rezero from a whole number": ("encoder", "ForMaskedLM", dict(residual={"type": "rezero", "init": 1})),
    "a window of one token": ("encoder", "ForMaskedLM", dict(block={"type": "r_transformer", "window": 1})),
    "layers' numbers as text": ("encoder", "ForMaskedLM", dict(per_layer_config={"0": {"feedforward": "relu"}})),
    "an override that changes nothing": (
        "decoder",
        "ForCausalLM",
        dict(residual="pre_ln", per_layer_config={0: {"residual": "pre_ln"}}),
    ),
    **{
        f"a window that holds the whole text, {shape}": (shape, head, {"attention": {"type": "lolcats", "window": 64}})
        for shape, head in (("encoder", "ForMaskedLM"), ("decoder", "ForCausalLM"))
    },
    "residuals by layer, the last one's at the end": (
        "decoder",
        "ForCausalLM",
        dict(residual="post_ln", per_layer_config={0: {"residual": "rezero"}, 1: {"residual": "pre_ln"}}),
    ),
    "norms by layer, those of conditional attention": (
        "seq2seq",
        "Model",
        dict(
            attention="conditional",
            stack="conditional_computation",
            per_layer_config={0: {"normalization": "rms_norm"}},
        ),
    ),
    "norms by layer, the one in the place of a denominator": (
        "decoder",
        "ForCausalLM",
        dict(
            attention={"type": "t2r", "normalization": "output_norm"}, per_layer_config={0: {"layer_norm_eps": 1e-3}}
        ),
    ),
    "a sinkhorn decoder of one block": (
        "decoder",
        "ForCausalLM",
        dict(attention={"type": "sinkhorn_transformer", "block_size": 24}),
    ),
    **{
        f"DeLighT without narrowing around {attention['type']}": (
            "decoder",
            "ForSequenceClassification",
            dict(attention=attention, block={"type": "delight", "proj_factor": 1}),
        )
        for attention in (
            {"type": "talking_heads", "num_value_heads": 8},
            {"type": "multi_head_latent_attention", "v_head_dim": 3},
        )
    },
    **{f"a bare {shape} whose choices no loss teaches": (shape, "Model", dict(attention="sac")) for shape in FLAGS},
    "sparse gradients": (
        "encoder",
        "ForMaskedLM",
        dict(feedforward={"type": "product_key_memory", "num_keys": 8, "topk": 8, "sparse_gradients": True}),
    ),
}


@pytest.mark.parametrize("name", WORKS)
def test_works(name):
    shape, head, fields = WORKS[name]
    outcome = check(mix_of(shape, head, **fields))
    assert outcome.kind == "works", outcome


HEAD = {"encoder": "ForMaskedLM", "decoder": "ForCausalLM", "seq2seq": "ForSeq2SeqLM"}
HI = dict(stack={"type": "hi_transformer", "segment_length": 4}, block="hi_transformer", position="none")
REVERSIBLE = dict(stack="reversible", residual="pre_ln")
WHOLE = "all layers of a tower have in common"
REFUSED = [
    (
        dict(shape="decoder", feedforward="hash_layers", stack="feedback", attention="feedback"),
        "see other states than",
    ),
    (
        dict(
            shape="decoder",
            stack="feedback",
            attention="feedback",
            per_layer_config={0: {"normalization": "rms_norm"}},
        ),
        "feedback stack gives all layers the same memories",
    ),
    (
        dict(attention="transformer_xl", position="none", stack={"type": "compressive", "reconstruction_weight": 0}),
        "learns from the reconstruction loss alone",
    ),
    (dict(shape="seq2seq", decoder={"id2label": {0: "a"}}), "overrides 'id2label', which both towers share"),
    (dict(shape="seq2seq", decoder={"hidden_dropout_prob": 2.0}), r"probability in \[0, 1\), got 2.0"),
    *[
        (dict(per_layer_config={1: {name: value}}), f"overrides '{name}', which {WHOLE}")
        for name, value in {
            "position": "rotary",
            "hidden_size": 8,
            "is_decoder": True,
            "output_hidden_states": True,
            "decoder": {"attention": "dense"},
        }.items()
    ],
    *[
        (dict(position=position, per_layer_config={1: fields}), f"'{position}' has the same tables for all layers")
        for position, fields in (
            ("rotary", {"head_dim": 8}),
            ("t5_relative_bias", {"num_attention_heads": 2, "head_dim": 4}),
            ("tupe", {"head_dim": 8}),
        )
    ],
    *[
        (
            dict(attention=attention, position="none", per_layer_config={1: {"head_dim": 8}}),
            "shares tensors between layers",
        )
        for attention in ("transformer_xl", "adaptive_span")
    ],
    (dict(per_layer_config=[{"attention": "dense"}]), "must be a dict of layer numbers .* got list"),
    (dict(per_layer_config=3), "must be a dict of layer numbers .* got int: 3"),
    (
        dict(per_layer_config={"first": {"attention": "dense"}}),
        "numbers of layers from 0 on as keys, each once, got 'first'",
    ),
    (dict(per_layer_config={-1: {"attention": "dense"}}), "got -1"),
    (dict(per_layer_config={"0": {"feedforward": "relu"}, 0: {"feedforward": "relu"}}), "each once, got 0"),
    (dict(per_layer_config={0: 5}), r"`per_layer_config\[0\]` must be a dict of fields, got int: 5"),
    (dict(per_layer_config={0: {"head_width": 8}}), "'head_width', which is no field"),
    (dict(per_layer_config={0: {"tower": "trunk"}}), "'tower', which is no field"),
    (dict(attention={"type": "dense", "scale": -1}), "needs `scale` > 0, got -1"),
    (dict(dtype="no_type"), "name of a torch dtype such as 'bfloat16', got 'no_type'"),
    (
        dict(shape="decoder", attention={"type": "dpfp", "update_rule": "delta", "aggregation": "capsule_heads"}),
        "as `aggregation` needs; leave that out",
    ),
    (dict(attention={"type": "predictive_attention", "beta": 1}), "`beta` 1 has scores of the first layer alone"),
    (dict(attention={"type": "axial_transformer", "columns": 1}), "needs `columns` >= 2"),
    (dict(shape="decoder", stack={"type": "recurrent_windows", "window_size": 1}), "needs `window_size` >= 2"),
    (dict(shape="seq2seq", embedding="word_characters"), "set decoder={'embedding': 'token'}"),
    (dict(per_layer_config={9: {"attention": "dense"}}), "leave it out, or raise `num_hidden_layers`"),
    (dict(id2label=3), "`id2label` must be a dict .* got 3"),
    *((dict(id2label={key: "a"}), f"class numbers from 0 on as keys, got {key!r}") for key in ("first", -1)),
    *[
        (dict(feedforward="hash_layers", **stack), "see other states than the text's tokens")
        for stack in (
            dict(stack="global_tokens"),
            dict(stack="funnel", attention="transformer_xl", position="none"),
            HI,
        )
    ],
    *[
        (dict(HI, position=position), "acts inside layers on one sequence")
        for position in ("learnable_sinusoidal_relative", "tupe")
    ],
    *[
        (
            dict(stack, attention=attention),
            "hands tensors from layer to layer, which stack '(reversible|hi_transformer)' cannot",
        )
        for stack in (REVERSIBLE, HI)
        for attention in ("adaptive_span", "luna", "realformer")
    ],
    *[
        (dict(HI, attention=attention), "hands tensors from layer to layer, which block 'hi_transformer' cannot")
        for attention in ("transformer_xl",)
    ],
    (
        dict(stack={"type": "entropy_exit", "training_stage": "ramps"}, num_hidden_layers=1),
        "no classifier before the last of 1",
    ),
    (
        dict(attention="luna", per_layer_config={1: {"attention": "dense"}}),
        "carries a memory through all layers .* 'dense'",
    ),
    (
        dict(attention="dense", per_layer_config={1: {"attention": "luna"}}),
        "of layer 1 reads what layer 0 owns, which has 'dense'",
    ),
    (
        dict(attention={"type": "linformer", "sharing": "layerwise"}, per_layer_config={0: {"attention": "dense"}}),
        "'linformer' of layer 1 reads what layer 0 owns",
    ),
    (
        dict(shape="seq2seq", decoder={"embedding": {"type": "factorized", "width": 8}, "head": "transform"}),
        "read one token table",
    ),
]


def test_classifiers_read_no_series():
    for head in ("ForSequenceClassification", "ForQuestionAnswering"):
        outcome = check(mix_of("seq2seq", head, embedding="series", head="forecast"))
        assert outcome.kind == "refused" and "or embedding 'token'" in outcome.detail, outcome


@pytest.mark.parametrize("fields, message", REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_refused(fields, message):
    fields = dict(fields)
    shape = fields.pop("shape", "encoder")
    outcome = check(mix_of(shape, HEAD[shape], **fields))
    assert outcome.kind == "refused" and re.search(message, outcome.detail), outcome
