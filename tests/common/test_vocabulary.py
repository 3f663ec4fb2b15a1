"""Contract: the token table and the output projection, tied or not, through saving, training and resizing."""

import pytest
import torch

from tests.common.cases import CASES, components, covering
from tests.helpers import NO_DROPOUT, aligned, close, tokens


def table_parts(case):
    """What reads or writes tables of tokens: embeddings and heads in each shape, and each stack around them."""
    parts = components(case)
    tables = {(slot, name, words, case.shape) for slot, name, words, _ in parts if slot in ("embedding", "head")}
    return tables | {(slot, name) for slot, name, _, _ in parts if slot == "stack"}


def tables_alone(case):
    return {part for part in table_parts(case) if part[0] != "stack"}


EACH = [(case, True) for case in covering(CASES, table_parts)]
EACH += [(case, False) for case in covering(CASES, tables_alone)]
each_case = pytest.mark.parametrize(
    "case, tied", EACH, ids=lambda given: {True: "tied", False: "untied"}.get(given, str(given))
)


def pairs(model):
    """What the head may share with the embedding: (its own tensor, the embedding's)."""
    tied, embedding = model.config.head.tied(model.config), model.model.trunk.embedding
    return [(model.lm_head.get_parameter(name), embedding.get_parameter(there)) for name, there in tied.items()]


def is_tied(model):
    shared = {own is other for own, other in pairs(model)}
    assert len(shared) == 1
    return shared.pop()


def has_one_table(model):
    """Whether both towers read the same tensors."""
    towers = [model.model.trunk, *([model.model.decoder] if model.model.decoder is not None else [])]
    names = model.config.embedding.tables(model.config)
    tables = [[tower.embedding.get_parameter(name) for name in names] for tower in towers]
    return all(one is other for table in tables for one, other in zip(table, tables[0], strict=True))


@each_case
def test_tying(case, tied, tmp_path):
    model = case.build(dtype=torch.float32, tie_word_embeddings=tied, **NO_DROPOUT)
    assert is_tied(model) == tied and has_one_table(model)
    model.train()
    ids = tokens(2, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert is_tied(loaded) == tied and loaded.config.tie_word_embeddings == tied and has_one_table(loaded)
    for saved, read in zip(pairs(model), pairs(loaded), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(saved, read, strict=True))


@each_case
def test_resizing(case, tied, tmp_path):
    """More or fewer tokens: old ones keep their vectors and logits, and the result can be saved and loaded."""
    model = case.build(dtype=torch.float32, tie_word_embeddings=tied)
    if model.config.head.clusters(model.config) is not None:  # rows of which cluster?
        with pytest.raises(ValueError, match="of 99 cannot become one of 110"):
            model.resize_token_embeddings(110)
        return
    ids = tokens(2, 7, high=80)
    with torch.no_grad():
        expected = case.run(model, ids)
        for size in (110, 81):
            model.resize_token_embeddings(size, mean_resizing=False)
            kept = min(size, 99)
            assert model.config.vocab_size == size and model.get_input_embeddings().weight.shape[0] == size
            assert is_tied(model) == tied
            assert has_one_table(model)
            output = case.run(model, ids)
            assert output.shape[-1] == size
            close(output[..., :kept], expected[..., :kept], 1e-6)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert loaded.config.vocab_size == 81
        assert torch.equal(case.run(aligned(loaded), ids), output)
