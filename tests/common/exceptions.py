"""What the contract suite excuses a component or a family from, and why.

Keyed by `slot:component`, or by the model type of a family; in it a test's name without `test_` -> the reason. With
`:encoder`, `:decoder` or `:seq2seq` after it an entry holds in that shape only, and with a head's name (families only)
in the tests of every head, for that one. An entry that excuses nothing fails `test_suite_itself.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_xformers.core.components import SLOTS
from hf_xformers.families import ALL_HEADS

_CLOSED = "gates are closed or open in evaluation, so that their networks learn in training mode only"

EXCEPTIONS: dict[str, dict[str, str]] = {
    "embedding:complex_order": {
        "tying": "amplitudes and frequencies of words are no output table, so tying is refused",
        "resizing": "amplitudes and frequencies of words are no output table, so tying is refused",
    },
    "attention:moba": {
        "half_precision": (
            "after rounding another block may be the best one; tests/attention/test_large_scores.py compares"
            " precisions with equal queries and keys"
        )
    },
    "attention:reformer": {
        "half_precision": (
            "a key near a border falls into another bucket after rounding; tests/attention/test_reformer.py "
            "compares precisions with equal buckets"
        )
    },
    "attention:rfa": {
        "gradient_checkpointing": (
            "every training pass draws new features (section 3.1); tests/attention/test_performer.py compares a pass"
            " with its recomputation"
        )
    },
    "attention:routing_transformer": {
        "gradient_checkpointing": (
            "each training pass moves the centroids, so a second one has another commitment loss; "
            "tests/attention/test_routing.py compares passes from equal centroids"
        )
    },
    "attention:sac": {
        "gradient_checkpointing": (
            "it compares passes one after the other, between which the baseline of the policy gradient moves;"
            " tests/attention/test_sac.py compares passes from one state"
        )
    },
    "head:logistic_mixture": {
        "tying": "a mixture of distributions over intensities has no table of tokens",
        "resizing": "a mixture of distributions over intensities has no table of tokens, so resizing is refused",
    },
    "normalization:power_norm": {
        "gradient_checkpointing": (
            "each backward pass moves the running statistics, so a second pass differs by design"
        )
    },
    "feedforward:hash_layers": {
        "inputs_embeds": "experts are chosen by token id, which embeddings do not have",
        "gradient_causality": "experts are chosen by token id, which embeddings do not have",
    },
    "stack:axial_transformer": {
        "attention_weights:decoder": (
            "outer rows are read whole, for what reaches later rows only (section 3.2); "
            "tests/attention/test_axial_transformer.py compares them"
        ),
        "attention_weights:seq2seq": (
            "outer rows are read whole, for what reaches later rows only (section 3.2); "
            "tests/attention/test_axial_transformer.py compares them"
        ),
    },
    "feedforward:squared_reglu": {
        "finite_in_half_precision": (
            "the cube of its inputs is beyond float16 for such weights, and so is what the last projection makes of"
            " it, which no factor inside can help"
        )
    },
    "stack:distilling": {
        "attention_weights": "later layers attend among fewer states, a half of those before (section 3.2)"
    },
    "stack:etc": {
        "attention_weights": "global tokens are queries and keys beside the text (section 2.1)",
        "hidden_states:encoder": "states inside the stack are those of global tokens, too (section 2.1)",
    },
    "stack:funnel": {
        "attention_weights": (
            "later blocks attend among fewer states, and pooled queries among more keys (section 2.2)"
        ),
        "hidden_states": "states inside the stack have the length of their block (section 2.2)",
    },
    "stack:reversible": {
        "gradient_checkpointing": "its layers run twice without it; tests/stacks/test_reversible.py tests it"
    },
    "xf_conditional_computation_transformer": {
        "gradient_checkpointing": (
            "every training pass raises the gates' noise; tests/stacks/test_conditional_computation.py compares"
            " passes with equal noise"
        ),
        **{f"loss_and_saving:{head}": _CLOSED for head in ALL_HEADS},
    },
    "xf_dartsformer": {
        "gradient_checkpointing": (
            "a layer is one cell, inside which a recomputation ends with the last number that gradients need, so that"
            " the test does not see it run; tests/blocks/test_dartsformer.py compares gradients"
        )
    },
    "xf_deebert": {
        "loss_and_saving:ForSequenceClassification": (
            "the ramps inside learn in a second stage, on their own; tests/stacks/test_early_exit.py tests both"
        )
    },
    "attention:memory_vector": {"attention_weights:seq2seq": "it adds a vector, without weights (section 3.2)"},
    "xf_hibert": {
        "hidden_states": "states inside the stack are those of sentences' words, and of sentences (section 3.1)",
        "attention_weights": (
            "weights are those of each sentence's words, and of the sentences; tests/stacks/test_hibert.py compares"
            " states"
        ),
    },
    "xf_hiersumm": {
        "attention_weights": "weights are those of each paragraph's words, and of paragraphs; tests compare states",
        "hidden_states": "states inside the encoder are those of paragraphs' words (section 3.2)",
    },
    "xf_hi_transformer": {
        "attention_weights": (
            "weights are those of each sentence's words and its text; tests/stacks/test_hi_transformer.py "
            "compares them"
        )
    },
    "xf_pabee": {
        "loss_and_saving:ForSequenceClassification": (
            "evaluation stops at the exit, below later classifiers; tests/stacks/test_early_exit.py tests their"
            " gradients"
        )
    },
    "xf_token_early_exit": {
        "loss_and_saving:ForTokenClassification": (
            "in evaluation the last classifier alone has a loss; tests/stacks/test_token_exit.py tests the gradients"
            " of the others"
        )
    },
    "xf_voting_early_exit": {
        "loss_and_saving:ForSequenceClassification": (
            "evaluation stops at the exit, below later classifiers; tests/stacks/test_voting_exit.py tests their"
            " gradients"
        )
    },
    "xf_sparse_transformer": {
        "determinism": "its output starts at zero (section 6), so that a new model gives the same whatever it reads"
    },
}


def holders(config: Any) -> list[str]:
    """The keys of EXCEPTIONS that a model of this config answers to: its family and all its components."""
    found = {config.model_type}
    for tower in config.tower_configs():
        layers = list(tower.per_layer_config) if tower.is_heterogeneous else [tower]
        specs = [getattr(layer, slot) for layer in layers for slot in SLOTS]
        found |= {f"{spec.slot}:{spec.type}" for spec in specs}
    return sorted(found)


def exception(names: Iterable[str], *keys: str) -> str | None:
    """Why one of these holders is excused under one of these keys (a test, `test:shape`, `test:head`); None: none."""
    for name in names:
        for key in keys:
            if key in EXCEPTIONS.get(name, {}):
                return f"{name}: {EXCEPTIONS[name][key]}"
    return None
