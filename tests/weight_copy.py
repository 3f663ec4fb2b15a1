"""Weights of transformers' models for ours, written out name by name: nothing of the package's own conversion."""

from torch import nn

OUTER = {
    "embeddings.word_embeddings": "trunk.embedding.tokens",
    "embeddings.position_embeddings": "trunk.position.table",
    "embeddings.token_type_embeddings": "trunk.embedding.types",
    "embeddings.LayerNorm": "trunk.embedding.norm",
}
INSIDE = {
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attention_residual.norm",
    "intermediate.dense": "feedforward.up_proj",
    "output.dense": "feedforward.down_proj",
    "output.LayerNorm": "feedforward_residual.norm",
}


def take_bert_weights(ours: nn.Module, theirs: nn.Module, **further: str) -> None:
    """Into a model of ours from one that is laid out as transformers' BERT. further: other modules of a layer's
    `attention.self`, with their names in our attention."""
    inside = {**INSIDE, **{f"attention.self.{old}": f"attention.{new}" for old, new in further.items()}}
    names = dict(OUTER)
    for layer in range(len(ours.trunk.layers)):
        names.update({f"encoder.layer.{layer}.{old}": f"trunk.layers.{layer}.{new}" for old, new in inside.items()})
    state = {}
    for name, tensor in theirs.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if module in names:
            state[f"{names[module]}.{leaf}"] = tensor
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
