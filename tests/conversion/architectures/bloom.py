"""BLOOM: ALiBi, a norm after the embedding, queries, keys and values in one projection."""

from tests.conversion.architectures import VOCAB, Architecture

ARCHITECTURE = Architecture(
    model_type="bloom",
    ours="xformer",
    tiny=dict(
        vocab_size=VOCAB,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    heads={
        "BloomModel": "Model",
        "BloomForCausalLM": "ForCausalLM",
        "BloomForSequenceClassification": "ForSequenceClassification",
        "BloomForTokenClassification": "ForTokenClassification",
        "BloomForQuestionAnswering": "ForQuestionAnswering",
    },
    variations={
        "six_heads": {"n_head": 6, "hidden_size": 36},
        "untied": {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    },
    base=dict(vocab_size=50304, hidden_size=768, n_layer=12, n_head=12),
    refused=frozenset({"apply_residual_connection_post_layernorm"}),
    unread=frozenset({"pretraining_tp", "slow_but_exact"}),
)
