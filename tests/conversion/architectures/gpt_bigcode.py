"""GPT-BigCode: one head of keys and values for all heads of queries, or one for each."""

from tests.conversion.architectures import SPECIAL, VOCAB, Architecture, named

ARCHITECTURE = Architecture(
    model_type="gpt_bigcode",
    ours="xformer",
    tiny=dict(
        **SPECIAL, vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=24, activation_function="gelu_new"
    ),
    heads=named("GPTBigCode", "Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"),
    variations={
        "a_head_each": {"multi_query": False},
        "unscaled": {"scale_attn_weights": False, "n_inner": 48, "tie_word_embeddings": False},
    },
    sides=("right",),  # positions count padding on the left
    refused=frozenset({"add_cross_attention"}),
    noted=frozenset({"embd_pdrop"}),
    unread=frozenset({"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"}),
)
