"""What configs refuse of whole configs, in one sentence: a line for each."""

from tests.refused import refusals

REFUSED = [
    # adaptive_vocabulary
    ("embedding 'adaptive' is tied to a head 'adaptive' .* got head 'linear'", dict(embedding="adaptive")),
    ("with the same `cutoffs`", dict(embedding="adaptive", head={"type": "adaptive", "width": 12})),
    (r"`cutoffs` that rise from 1 on, got \[9, 9\]", dict(embedding={"type": "adaptive", "cutoffs": [9, 9]})),
    ("`cutoffs` that rise from 1 on", dict(embedding={"type": "adaptive", "cutoffs": [0, 9]})),
    ("`factor` >= 1", dict(embedding={"type": "adaptive", "factor": 0})),
    ("`width` >= 1", dict(embedding={"type": "adaptive", "width": 0})),
    (
        "of width 16 / 8.2 < 1",
        dict(hidden_size=16, num_attention_heads=2, embedding={"type": "adaptive", "cutoffs": [9, 20], "factor": 8}),
    ),
    ("head 'adaptive' is tied to an embedding 'adaptive' .* got embedding 'token'", dict(head="adaptive")),
    # contracts
    ("reads a layer's input as it is", dict(position="deberta", stack="enhanced_mask_decoder", residual="pre_ln")),
    # factorized_embedding
    ("of width 6 needs the head 'transform'.* got 'linear'", dict(embedding={"type": "factorized", "width": 6})),
    (
        "`narrow_positions` adds positions at its own width, which .*learnable_sin",
        dict(
            embedding={"type": "factorized", "narrow_positions": True},
            head="transform",
            position="learnable_sinusoidal",
        ),
    ),
    (
        "even width .* got 5",
        dict(
            embedding={"type": "factorized", "width": 5, "narrow_positions": True},
            head="transform",
            position="sinusoidal_absolute",
        ),
    ),
    # hand_overs
    ("that only stack 'feedback' makes, not 'plain'", dict(attention="feedback", is_decoder=True)),
    ("block 'hi_transformer' works on sentences, which stack 'plain' does not make; ", dict(block="hi_transformer")),
    ("block 'hiersumm' works on paragraphs, which stack 'plain' does not make", dict(block="hiersumm")),
    ("reads the slots of a memory, which stack 'plain' does not give", dict(block="memformer")),
    ("reads pixels, which embedding 'token' does not give", dict(block="transformer_in_transformer")),
    ("which stack 'plain' does not give; use stack='etc'", dict(position="etc_relative")),
    ("makes memories that attention 'dense' does not read", dict(stack="feedback")),
    ("levels, which block 'vanilla' does not; set `block='hi_transformer'`", dict(stack="hi_transformer")),
    ("the other paragraphs, which block 'vanilla' has not; set", dict(stack="hiersumm")),
    ("has a memory that block 'vanilla' does not read; use block 'memformer'", dict(stack="memformer")),
    ("block 'hiersumm' works on paragraphs, which stack 'memformer'", dict(block="hiersumm", stack="memformer")),
    # heads
    ("leaves nothing", dict(vocab_size=40, head={"type": "linear", "unpredicted": 40}, tie_word_embeddings=False)),
    ("cannot be tied", dict(head={"type": "linear", "unpredicted": 1})),
    ("unknown activation 'glu2'; known: .*gelu", dict(head={"type": "transform", "activation": "glu2"})),
    ("'dense_norm' does not tell apart", dict(classifier_transform="dense_norm", normalization="power_norm")),
    ("inside stack 'entropy_exit' are linear", dict(classifier_transform="dense", stack="entropy_exit")),
    ("inside stack 'entropy_exit' are linear", dict(classifier_pooling="late_mean", stack="entropy_exit")),
    ("inside stack 'patience_exit' are linear", dict(classifier_transform="dense", stack="patience_exit")),
    ("inside stack 'patience_exit' are linear", dict(classifier_pooling="late_mean", stack="patience_exit")),
    ("`classifier_activation`: unknown activation 'geluu'", dict(classifier_activation="geluu")),
    # id_tables
    ("got 'input_ids', which is no name, is", dict(embedding={"type": "token", "id_tables": (("input_ids", 3),)})),
    ("got 'langs', which is .* comes", dict(embedding={"type": "token", "id_tables": (("langs", 3), ("langs", 3))})),
    ("got 'a language', which is no name", dict(embedding={"type": "token", "id_tables": (("a language", 3),)})),
    ("needs a row at least in each of `id_tables", dict(embedding={"type": "token", "id_tables": (("langs", 0),)})),
    ("id_tables", dict(embedding={"type": "token", "id_tables": (("langs", "three"),)}), TypeError),
    (
        "a decoder's tables would never be read",
        dict(is_encoder_decoder=True, embedding={"type": "token", "id_tables": (("langs", 2),), "absent_ids": "none"}),
    ),
    # layers of a family that has some of its own
    *(
        (message, dict(variant="xf_gpt3_alternating", per_layer_config=layers), *error)
        for message, layers, *error in (
            ("must be a dict of layer numbers .* got list", [{"attention": "dense"}], TypeError),
            ("must be a dict of fields, got str: 'dense'", {1: "dense"}, TypeError),
            ("numbers of layers from 0 on as keys, each once, got 'first'", {"first": {}}),
        )
    ),
    # pretraining_specs
    ("overrides 'pretraining', which both towers share", dict(decoder={"pretraining": {}})),
    ("overrides 'pretraining', which all", dict(per_layer_config={0: {"pretraining": {"reordering": {"chunks": 2}}}})),
]


test_refused = refusals(REFUSED)
