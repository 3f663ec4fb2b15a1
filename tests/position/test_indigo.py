"""InDIGO: relations by replaying insertions, scores by a loop, decoding."""

import itertools

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.position.indigo import insert, places_of, relations
from hf_xformers.variants.indigo import XFIndigoConfig, XFIndigoForCausalLM
from tests.attention.score_helpers import HEADS, small_blocks
from tests.helpers import close, make_strong, pad, tokens
from tests.position.term_helpers import D_HEAD, check_scores

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)


def test_relations_of_every_order():
    """Each permutation of four tokens, built up by insertions: the relations are those of the finished text, and never
    change once made."""
    for order in itertools.permutations(range(4)):
        places = torch.tensor(order)  # place of the token generated first, second, ...
        final = relations(places)
        grown = torch.zeros(1, 1, dtype=torch.long)
        for number in range(1, 4):
            left = [j for j in range(number) if order[j] < order[number]]
            if left:  # right of its nearest neighbour to the left
                grown = insert(grown, max(left, key=lambda j: order[j]), right=True)
            else:
                grown = insert(grown, min(range(number), key=lambda j: order[j]), right=False)
            assert torch.equal(grown, final[: number + 1, : number + 1])
        assert torch.equal(places_of(final), places)
        assert torch.equal(final, -final.t())


def test_scores_left_to_right():
    """Without places, earlier slots stand left."""

    def scores(layer, module, query, key):
        table = layer.position_terms.table
        matrix = torch.empty(2, HEADS, 9, 9, dtype=query.dtype)
        for i, j in itertools.product(range(9), range(9)):
            relation = (i > j) - (i < j)
            matrix[..., i, j] = (query[..., i, :] * (key[..., j, :] + table[relation + 1])).sum(-1) / D_HEAD**0.5
        return matrix

    check_scores("indigo", scores, causal=True)


def model():
    torch.manual_seed(0)
    return make_strong(
        XFormerForCausalLM(XFormerConfig(**SIZES, position="indigo", is_decoder=True)).double().eval(), amount=0.3
    )


PLACES = torch.tensor([[0, 4, 2, 1, 3], [3, 0, 1, 4, 2]])


def test_refusals():
    made, ids = model(), tokens(2, 5, high=50)
    with pytest.raises(ValueError, match="covers 3 tokens"):
        made(ids, insertion_positions=PLACES[:, :3])


# ------------------------------------------------------------------------------------------------ words and places


def inserting():
    torch.manual_seed(0)
    config = XFIndigoConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return make_strong(XFIndigoForCausalLM(config).double().eval(), amount=0.3)


def text(words, order):
    """Ids and places [1, T] of boundaries and words, these in the order of their generation."""
    places = [0, len(words) + 1] + [1 + number for number in order]
    return torch.tensor([[1, 2] + [words[number] for number in order]]), torch.tensor([places])


def place_loss_by_loop(model, ids, places, first=0):
    """-log p of each insertion: both names of the gap between the nearest neighbours, over all slots inside the
    text."""
    states = model.model(input_ids=ids, insertion_positions=places).last_hidden_state[0]
    _, pointer, left, right = model.lm_head.parts(states).chunk(4, dim=-1)
    z, losses = places[0].tolist(), []
    for n in range(1, len(z)):
        query = (pointer[n - 1] + model.get_input_embeddings().weight[ids[0, n]]) / 2**0.5
        scores = {("left", j): query @ left[j] / 4 for j in range(n)}
        scores |= {("right", j): query @ right[j] / 4 for j in range(n)}
        del scores["left", 0]
        scores.pop(("right", 1), None)
        names = []
        below, above = [j for j in range(n) if z[j] < z[n]], [j for j in range(n) if z[j] > z[n]]
        if below:
            names.append(("right", max(below, key=lambda j: z[j])))
        if above:
            names.append(("left", min(above, key=lambda j: z[j])))
        total = torch.stack(list(scores.values())).exp().sum()
        losses.append(-(sum(scores[name].exp() for name in names) / total).log())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_place_loss(order):
    model = inserting()
    ids, places = text([10, 11, 12, 13], order)
    expected = place_loss_by_loop(model, ids, places)
    for rows in (64, 2):
        with small_blocks(rows):
            output = model(ids, labels=ids, insertion_positions=places)
            close(output.aux_losses["place"], expected)
    words = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:])
    close(output.loss, words + expected)


def test_place_loss_of_padded_rows():
    """Each row counts as it does alone, whatever stands in the padding."""
    model = inserting()
    one, two = text([10, 11, 12, 13], (2, 0, 3, 1)), text([10, 11], (1, 0))
    for side in (0, 2):  # padding before or after
        ids, places, mask = torch.full((2, 6), 7), torch.full((2, 6), 40), torch.zeros(2, 6, dtype=torch.long)
        ids[0], places[0], mask[0] = one[0], one[1], 1
        where = slice(2, 6) if side == 0 else slice(0, 4)
        ids[1, where], places[1, where], mask[1, where] = two[0], two[1], 1
        labels = ids.masked_fill(mask == 0, -100)
        labels[1, 2 if side == 0 else 0] = -100  # the first real token of a row has no target
        found = model(ids, attention_mask=mask, labels=labels, insertion_positions=places).aux_losses["place"]
        alone = [place_loss_by_loop(model, *row) for row in (one, two)]
        close(found, (5 * alone[0] + 3 * alone[1]) / 8)


def test_padding_predicts_no_first_token():
    """A text has the same loss with padding on the left of it as alone, whose first token is no target."""
    model, ids = inserting(), tokens(1, 5, high=20)
    padded, mask = pad([ids[0]], 8, "left", seed=3)
    alone = model(ids, labels=ids)
    found = model(padded % 20, attention_mask=mask, labels=torch.where(mask.bool(), padded, -100))
    close(found.loss, alone.loss)
    close(found.aux_losses["place"], alone.aux_losses["place"])


def test_insertion_decoding():
    """Step by step with a cache, and by the whole text at every step, with the slots looked up by hand."""
    model = inserting()
    found = model.insert_tokens(torch.tensor([[1, 2], [1, 3]]), max_new_tokens=5)
    for row, right_boundary in enumerate((2, 3)):
        order, ids = [0, 1], torch.tensor([[1, right_boundary]])
        for _ in range(5):
            places = torch.tensor([[order.index(t) for t in range(len(order))]])
            with torch.no_grad():
                states = model.model(input_ids=ids, insertion_positions=places).last_hidden_state
                word = model.lm_head(states[0, -1]).argmax()
                pointer, left, right = (x[0] for x in model.lm_head.pointers(states))
                query = pointer[-1] + model.get_input_embeddings().weight[word]
            slots = {(t, 0): query @ left[t] for t in range(len(order)) if t != 0}
            slots |= {(t, 1): query @ right[t] for t in range(len(order)) if t != 1}
            token, side = max(slots, key=lambda slot: slots[slot])
            order.insert(order.index(token) + side, len(order))
            ids = torch.cat([ids, word[None, None]], dim=1)
        assert found[row] == [int(ids[0, t]) for t in order if t > 1]


def test_decoding_ends():
    model = inserting()
    first = model.insert_tokens(torch.tensor([[1, 2]]), max_new_tokens=1)[0][0]
    assert model.insert_tokens(torch.tensor([[1, 2]]), max_new_tokens=4, eos_token_id=first) == [[]]
    with pytest.raises(ValueError, match="two boundary tokens"):
        model.insert_tokens(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
