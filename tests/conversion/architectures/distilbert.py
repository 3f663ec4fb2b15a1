"""DistilBERT."""

import numpy as np
import torch

from tests.conversion.architectures import TASKS, VOCAB, Architecture, named


def sinusoids_again(model) -> None:
    """The table that `sinusoidal_pos_embds` starts with."""
    config = model.config
    if config.sinusoidal_pos_embds:
        table = np.zeros((config.max_position_embeddings, config.dim))
        for place in range(len(table)):
            for column in range(config.dim):
                angle = place / 10000 ** (2 * (column // 2) / config.dim)
                table[place, column] = np.cos(angle) if column % 2 else np.sin(angle)
        model.base_model.embeddings.position_embeddings.weight.copy_(torch.tensor(table).float())


ARCHITECTURE = Architecture(
    model_type="distilbert",
    ours="xformer",
    tiny=dict(vocab_size=VOCAB, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=24),
    heads=named("DistilBert", "Model", "ForMaskedLM", *TASKS, "ForMultipleChoice"),
    variations={
        "sinusoids": {"sinusoidal_pos_embds": True},
        "relu": {"activation": "relu"},
        "wider heads": {"n_heads": 2, "n_layers": 3},
    },
    base=dict(n_layers=12),
    sides=("right",),
    ready=sinusoids_again,
    noted=frozenset({"qa_dropout"}),
    other_values={"activation": "relu"},
)
