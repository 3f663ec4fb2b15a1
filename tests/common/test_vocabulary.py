"""Contract: the token table and the output projection, tied or not, through saving, training and resizing."""

import pytest
import torch

from tests.common.cases import each_case
from tests.helpers import NO_DROPOUT, aligned, close, tokens

tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def is_tied(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def tables(model):
    """The token tables of both towers, which are one."""
    towers = [model.model.trunk, *([model.model.decoder] if model.model.decoder is not None else [])]
    return [tower.get_input_embeddings().weight for tower in towers]


@each_case
@tied_or_not
def test_tying(case, tied, tmp_path):
    model = case.build(dtype=torch.float32, tie_word_embeddings=tied, **NO_DROPOUT)
    assert is_tied(model) == tied
    assert all(table is model.get_input_embeddings().weight for table in tables(model))
    model.train()
    ids = tokens(2, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert is_tied(loaded) == tied and loaded.config.tie_word_embeddings == tied
    assert all(table is loaded.get_input_embeddings().weight for table in tables(loaded))
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert torch.equal(loaded.get_output_embeddings().weight, model.get_output_embeddings().weight)


@each_case
@tied_or_not
def test_resizing(case, tied, tmp_path):
    """More or fewer tokens: old ones keep their vectors and logits, and the result can be saved and loaded."""
    model = case.build(dtype=torch.float32, tie_word_embeddings=tied)
    ids = tokens(2, 7, high=80)
    with torch.no_grad():
        expected = case.run(model, ids)
        for size in (110, 81):
            model.resize_token_embeddings(size, mean_resizing=False)
            kept = min(size, 99)
            assert model.config.vocab_size == size and model.get_input_embeddings().weight.shape[0] == size
            assert is_tied(model) == tied
            assert all(table is model.get_input_embeddings().weight for table in tables(model))
            output = case.run(model, ids)
            assert output.shape[-1] == size
            close(output[..., :kept], expected[..., :kept], 1e-6)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert loaded.config.vocab_size == 81
        assert torch.equal(case.run(aligned(loaded), ids), output)
