"""MPNet."""

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias

ARCHITECTURE = Architecture(
    model_type="mpnet",
    ours="xformer",
    tiny=SMALL,
    heads=named("MPNet", "Model", "ForMaskedLM", *TASKS, "ForMultipleChoice"),
    variations={"relu": {"hidden_act": "relu"}, "wider heads": {"num_attention_heads": 2, "layer_norm_eps": 1e-5}},
    ready=one_bias,
    refused=frozenset({"relative_attention_num_buckets", "pad_token_id"}),
)
