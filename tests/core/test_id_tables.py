"""Further tables of the embedding 'token', each read by a model input of its own."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMultipleChoice, XFormerModel
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    position="none",
    **NO_DROPOUT,
)


def model(kind=XFormerModel, tables=(("langs", 3), ("tasks", 2)), **embedding):
    torch.manual_seed(0)
    embedding = {"type": "token", "id_tables": tables, **embedding}
    return make_strong(kind(XFormerConfig(**SIZES, embedding=embedding)).double().eval())


@torch.no_grad()
@pytest.mark.parametrize("absent", ["first", "none"])
@pytest.mark.parametrize("given", [(), ("langs",), ("langs", "tasks")])
def test_vectors_are_added(absent, given, tmp_path):
    net, ids = model(absent_ids=absent), tokens(2, 5, high=40)
    langs, tasks = tokens(2, 5, low=0, high=3), torch.tensor([[1], [0]])  # of each token, and of a whole text
    part = net.trunk.embedding
    expected = part.tokens.weight[ids]
    for name, chosen in (("langs", langs), ("tasks", tasks)):
        table = part.id_tables[name].weight
        if name in given:
            expected = expected + table[chosen]
        elif absent == "first":
            expected = expected + table[0]
    inputs = {name: chosen for name, chosen in (("langs", langs), ("tasks", tasks)) if name in given}
    output = net(input_ids=ids, **inputs, output_hidden_states=True)
    close(output.hidden_states[0], expected)
    net.save_pretrained(tmp_path)
    again = XFormerModel.from_pretrained(tmp_path).double()
    assert again.config.embedding == net.config.embedding
    close(again(input_ids=ids, **inputs).last_hidden_state, output.last_hidden_state, 1e-5)


@torch.no_grad()
def test_choices_are_rows():
    net, ids, langs = model(XFormerForMultipleChoice), tokens(2, 3, 5, high=40), tokens(2, 3, 5, low=0, high=3)
    logits = net(input_ids=ids, langs=langs).logits
    for choice in range(3):
        alone = net(input_ids=ids[:, [choice]], langs=langs[:, [choice]]).logits
        close(logits[:, [choice]], alone)


def test_refusals():
    net, ids = model(), tokens(2, 5, high=40)
    with pytest.raises(ValueError, match=r"`langs` must be .* a row has 5, or \[batch, 1\], got \[2, 4\]"):
        net(input_ids=ids, langs=ids[:, :4])
    with pytest.raises(TypeError, match="reads the argument `lang`; did you mean `langs`"):
        net(input_ids=ids, lang=ids)


def test_a_decoder_whose_tables_nothing_reads():
    """Ids go to the encoder; without a first row that counts, a decoder's tables had no gradient."""
    embedding = {"type": "token", "id_tables": (("langs", 2),), "absent_ids": "none"}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "is_encoder_decoder": True}
    own = XFormerConfig(**sizes, embedding=embedding, decoder={"embedding": {"type": "token"}})
    assert not own.tower("decoder").embedding.id_tables and own.tower("trunk").embedding.id_tables
