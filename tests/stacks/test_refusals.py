"""What configs refuse of stacks, in one sentence: a line for each."""

from tests.refused import refusals

REFUSED = [
    # ca_mtl
    ("reads a vector of the task, which stack 'plain' does not make", dict(residual="conditional_post_ln")),
    ("changes the gain of a layer", dict(stack="ca_mtl", residual="conditional_post_ln", normalization="rms_norm")),
    ("nothing reads", dict(stack={"type": "ca_mtl", "alignment": False, "reduction": None})),
    ("is for 2 tasks, and the stack", dict(stack="ca_mtl", attention={"type": "ca_mtl", "num_tasks": 2})),
    ("knows no task", dict(stack={"type": "ca_mtl", "num_tasks": 2}, is_encoder_decoder=True)),
    ("each row has a task of its own", dict(stack="ca_mtl", unpad_inputs=True)),
    # conditional_computation
    ("set `stack='conditional_computation'`", dict(cross_attention="conditional")),
    ("does not come out even", dict(intermediate_size=26, feedforward="conditional", stack="conditional_computation")),
    # decoder_exit
    ("'token_exit' for the tokens of an encoder", dict(stack="decoder_exit")),
    ("training='aligned'", dict(stack={"type": "decoder_exit", "halting": "gates", "training": "mixed"})),
    ("attention 'dense'", dict(is_decoder=True, stack="decoder_exit", attention="linear_transformer")),
    # distilling
    ("lengths differ between layers.*sinusoidal_absolute", dict(stack="distilling", position="rotary")),
    ("stack 'distilling' runs its layers apart", dict(stack="distilling", attention="transformer_xl")),
    ("at most 2", dict(num_hidden_layers=3, stack={"type": "distilling", "halvings": 3})),
    # early_exit
    ("4 exits before the last", dict(num_hidden_layers=5, stack={"type": "entropy_exit", "threshold": [0.1, 0.2]})),
    ("`patience` 5 never leaves 5 layers", dict(num_hidden_layers=5, stack={"type": "patience_exit", "patience": 5})),
    # enhanced_mask_decoder
    ("a position inside it such as 'deberta'", dict(variant="xf_deberta", position="rotary")),
    ("as it is, got residual 'pre_ln'", dict(variant="xf_deberta", residual="pre_ln")),
    ("cannot stand in a decoder", dict(variant="xf_deberta", is_decoder=True)),
    # ernie_doc
    ("key_types", dict(attention={"type": "transformer_xl", "key_types": -1})),
    ("would have seen the tokens", dict(is_decoder=True, stack={"type": "segment_recurrent", "retrospective": True})),
    # funnel
    ("rotary|rotates", dict(attention="transformer_xl", position="rotary")),
    ("must sum to", dict(stack={"type": "funnel", "block_sizes": (1, 1)})),
    ("as many `block_repeats`", dict(stack={"type": "funnel", "block_repeats": (1, 1)})),
    ("attention='transformer_xl'", dict(stack="funnel")),
    ("'vanilla'", dict(attention="transformer_xl", stack="funnel", block="macaron")),
    ("does not come first in block", dict(attention="transformer_xl", stack="funnel", block="mask_attention_network")),
    # han_nmt
    ("does nothing in an encoder alone", dict(stack={"type": "han_nmt", "side": "decoder"})),
    # hi_transformer
    ("set `stack='hi_transformer'`", dict(block="hi_transformer")),
    ("set `block='hi_transformer'`", dict(stack="hi_transformer")),
    ("acts inside layers on one", dict(position="t5_relative_bias", stack="hi_transformer", block="hi_transformer")),
    ("from layer to layer, which", dict(stack="hi_transformer", block="hi_transformer", attention="realformer")),
    # hibert
    ("set it as `cross_attention`", dict(attention="memory_vector")),
    ("no scores", dict(cross_attention={"type": "memory_vector", "scale": 2.0})),
    *[
        (why, dict(cross_attention="memory_vector", residual=residual, is_encoder_decoder=True))
        for residual, why in (("peri_ln", "a norm without use"), ("no_residual", "would drop the text so far"))
    ],
    ("`document_layers` 2 leaves none of", dict(num_hidden_layers=2, stack={"type": "hibert", "document_layers": 2})),
    ("acts inside layers on one sequence, which stack 'hibert' has not", dict(position="alibi", stack="hibert")),
    ("stack 'hibert' runs its layers apart", dict(stack="hibert", attention="transformer_xl")),
    # hiersumm
    (
        "hiersumm has 2 heads .*fewer than the `graph_heads` 3",
        dict(num_attention_heads=2, block={"type": "hiersumm", "graph_heads": 3}, stack="hiersumm"),
    ),
    ("multiple of 4, got 18", dict(hidden_size=18, num_attention_heads=2, block="hiersumm", stack="hiersumm")),
    ("which block 'vanilla' has not", dict(stack="hiersumm")),
    ("Unknown|unknown|does not make", dict(stack={"type": "plain", "segment_length": 4})),
    # mask_modes
    ("attention 'performer' does not take; set `attention='dense'`", dict(stack="mask_modes", attention="performer")),
    ("block 'lite_transformer' reads neighbors", dict(stack="mask_modes", block="lite_transformer")),
    ("cannot stand in a decoder", dict(stack="mask_modes", is_decoder=True)),
    # memformer
    ("stack 'memformer'", dict(block="memformer")),
    ("use block", dict(stack="memformer")),
    # recurrent_windows
    ("is_decoder=True", dict(stack="recurrent_windows")),
    (
        "layers 0 to 2",
        dict(num_hidden_layers=3, is_decoder=True, stack={"type": "recurrent_windows", "insert_layer": 3}),
    ),
    (
        "windows of 6 tokens",
        dict(max_position_embeddings=5, is_decoder=True, stack={"type": "recurrent_windows", "window_size": 6}),
    ),
    ("attention 'dense'", dict(is_decoder=True, stack="recurrent_windows", attention="linear_transformer")),
    ("no place in the text", dict(is_decoder=True, stack="recurrent_windows", position="alibi")),
    # reversible
    ("post_ln", dict(stack="reversible")),
    ("'linear' cannot be tied", dict(residual="pre_ln", stack={"type": "reversible", "output": "concatenation"})),
    (
        "head 'fix_norm' does not read",
        dict(residual="pre_ln", stack={"type": "reversible", "output": "concatenation"}, head="fix_norm"),
    ),
    (
        "cross-attention does not read",
        dict(residual="pre_ln", stack={"type": "reversible", "output": "concatenation"}, is_encoder_decoder=True),
    ),
    # segment_recurrent
    ("attention='transformer_xl'", dict(stack="segment_recurrent")),
    ("block 'vanilla'", dict(attention="transformer_xl", stack="segment_recurrent", block="macaron")),
    # sharing
    ("attention 'realformer' as it is set hands tensors from layer", dict(distinct_layers=1, attention="realformer")),
    ("sublayers of the kind", dict(distinct_layers=1, share="feedforward", block="no_ffn", attention="all_attention")),
    ("block 'sandwich' has other sublayers at depth", dict(distinct_layers=1, block="sandwich")),
    ("sublayers of the kind 'feedforward'", dict(distinct_layers=1, share="feedforward", block="sandwich")),
    ("stack 'universal' says itself which of its layers run", dict(distinct_layers=1, stack="universal")),
    ("stack 'universal' says itself", dict(num_hidden_layers=3, layer_map=[0, 0, 0], stack="universal")),
    ("`distinct_layers` 0 must be at least 1", dict(distinct_layers=0)),
    ("at most the tower's 3 layers", dict(num_hidden_layers=3, distinct_layers=9)),
    ("single layers cannot differ", dict(distinct_layers=1, per_layer_config={})),
    ("says what layers share, and none do", dict(share="attention")),
    ("has 2 entries for the tower's 3 layers", dict(num_hidden_layers=3, layer_map=[0, 1])),
    ("leave no gaps", dict(num_hidden_layers=3, layer_map=[0, 2, 0])),
    ("leave no gaps", dict(num_hidden_layers=3, layer_map=[0, -1, 1])),
    ("has 2 different layers, and", dict(num_hidden_layers=3, layer_map=[0, 1, 1], distinct_layers=3)),
    # token_exit
    ("chooses tags together", dict(stack="token_exit", tag_decoder="crf")),
    ("linear", dict(stack="token_exit", classifier_transform="dense")),
    # transparent
    ("needs `is_encoder_decoder=True`", dict(stack="transparent")),
    # two_stream
    ("does not know; set `attention='transformer_xl'`", dict(stack="two_stream")),
    ("cannot stand in a decoder", dict(stack="two_stream", is_decoder=True)),
    ("starts its queries from one vector", dict(stack="two_stream", attention="transformer_xl")),
    (
        "got residual 'pre_ln'; use 'post_ln'",
        dict(position="none", stack="two_stream", attention="transformer_xl", residual="pre_ln"),
    ),
    ("learn of them through block", dict(stack="two_stream", attention="transformer_xl", block="conformer")),
    ("learn of them through block", dict(stack="two_stream", attention="transformer_xl", block="convolution")),
    ("learn of them through block 'cpe'", dict(stack="two_stream", attention="transformer_xl", block="cpe")),
    ("learn of them through block", dict(stack="two_stream", attention="transformer_xl", block="r_transformer")),
    ("learn of them through", dict(stack="two_stream", attention="transformer_xl", block="mask_attention_network")),
    ("by which feedforward", dict(stack="two_stream", attention="transformer_xl", feedforward="hash_layers")),
    ("takes statistics", dict(stack="two_stream", attention="transformer_xl", normalization="power_norm")),
    # universal
    ("does not divide `num_hidden", dict(num_hidden_layers=6, stack={"type": "universal", "layers_per_step": 4})),
    ("`groups=5`, of 3 layers each, for 4 ", dict(stack={"type": "universal", "groups": 5, "layers_per_step": 3})),
    ("even `hidden_size`, got 15", dict(hidden_size=15, num_attention_heads=3, stack="universal")),
    # voting_exit
    ("never 2", dict(stack={"type": "voting_exit", "vote_lambda": 1, "vote_threshold": 2})),
]


test_refused = refusals(REFUSED)
