"""Contract: the literal path equals the fast one; what can be asked for beside the result; determinism."""

import copy
import itertools

import pytest
import torch

from tests.common.cases import each_component, each_part
from tests.helpers import close, close_gradients, gradients, pad, tokens

IMPLEMENTATIONS = ("eager", "sdpa")


def padded_batch():
    return pad([tokens(13), tokens(6, seed=1), tokens(1, seed=2)], 13, "right")


@each_part
def test_eager_equals_fast(case, length=None):
    """`attn_implementation="eager"` runs the equation as written; forward and gradients, of one token and of more,
    and with padding."""
    calls = []
    for size in [length] if length else [1, 13]:
        ids = tokens(2, size)
        mask = torch.ones_like(ids)
        mask[0, size // 2 + 1 :] = 0
        calls += [(ids, given, mask) for given in ((None, mask) if size > 1 else (None,))]
    for ids, given, mask in calls:
        outputs, slopes = [], []
        for implementation in IMPLEMENTATIONS:
            model = case.shared(implementation=implementation)
            assert model.config._attn_implementation == implementation
            output = case.run(model, ids, given)
            outputs.append(output if given is None else output[mask.bool()])
            slopes.append(gradients(model, outputs[-1]))
        close(outputs[0], outputs[1])
        close_gradients(slopes[0], slopes[1])


def attention_kinds(case, output):
    """Name, weights by step, the queries' and the keys' config for what the model's output holds."""
    towers = case.preset.tower_configs()
    if case.shape != "seq2seq":
        return [("attentions", output.attentions, towers[0])]
    return [
        ("encoder_attentions", output.encoder_attentions, towers[0]),
        ("decoder_attentions", output.decoder_attentions, towers[1]),
        ("cross_attentions", output.cross_attentions, towers[1]),
    ]


@each_part
def test_attention_weights(case):
    """Shapes, one per step; each real query's weights sum to 1 over real keys, where its mechanism says so; asking
    changes nothing."""
    model = case.shared()
    ids, mask = padded_batch()
    more = {"decoder_input_ids": ids, "decoder_attention_mask": mask} if case.shape == "seq2seq" else {}
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, output_attentions=True, **more)
        close(output.logits, case.run(model, ids, mask))
    batch, length = ids.shape
    real = mask.bool()
    for name, weights, tower in attention_kinds(case, output):
        assert len(weights) == tower.stack.num_steps(tower), name
        for index, matrix in enumerate(weights):
            layer = tower.layer(index % tower.stack.num_layers(tower))
            assert matrix.shape == (batch, layer.num_attention_heads, length, length), name
            spec = layer.cross_attention if name == "cross_attentions" else layer.attention
            rows = matrix.transpose(1, 2)[real]  # [real queries, H, S]
            if spec.weighs(layer):
                close(rows.sum(-1), torch.ones_like(rows.sum(-1)))
                assert (matrix >= 0).all()
            keys = ~real[:, None, None, :].expand_as(matrix)
            assert (matrix[keys] == 0).all(), f"{name}: weight on padding"
            if tower.is_decoder and name != "cross_attentions":
                assert (matrix.triu(1) == 0).all(), f"{name}: weight on later tokens"


@each_component
def test_hidden_states(case):
    """The input of every step and the last one's output, which is what the head reads."""
    model, ids = case.shared(), tokens(2, 7)
    more = {"decoder_input_ids": ids} if case.shape == "seq2seq" else {}
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True, **more)
    towers = case.preset.tower_configs()
    if case.shape == "seq2seq":
        assert len(output.encoder_hidden_states) == towers[0].stack.num_steps(towers[0]) + 1
        assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
        states = output.decoder_hidden_states
    else:
        states = output.hidden_states
    assert len(states) == towers[-1].stack.num_steps(towers[-1]) + 1
    for state in states:
        assert state.shape == (2, 7, model.config.hidden_size)
    close(model.lm_head(states[-1]), output.logits)
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(states))


@each_component
def test_what_is_recorded_stands_where_its_tokens_do(case):
    """States and weights of every layer, as far as they have the text's length: of a padded row as of the row alone"""
    model, rows = case.shared(implementation="eager"), [tokens(13), tokens(6, seed=1)]

    def recorded(ids, mask):
        more = {"decoder_input_ids": ids, "decoder_attention_mask": mask} if case.shape == "seq2seq" else {}
        with torch.no_grad():
            output = model(ids, mask, output_hidden_states=True, output_attentions=True, **more)
        names = [f"{part}{name}" for part in ("", "encoder_", "decoder_") for name in ("hidden_states", "attentions")]
        return [entry for name in names for entry in output.get(name) or ()]

    alone = [recorded(row[None], torch.ones_like(row[None])) for row in rows]
    for side in ("right", "left"):
        ids, mask = pad(rows, 13, side)
        for step, entries in enumerate(recorded(ids, mask)):
            if entries.shape[0] != 2 or entries.shape[-2] < 13:
                continue
            for row, (one, real) in enumerate(zip(alone, mask.bool())):
                entry, own, count = entries[row], one[step][0], len(rows[row])
                if entry.ndim == 2:
                    close(entry[:13][real], own[:count])
                elif entry.shape[-1] >= 13:
                    close(entry[:, :13, :13][:, real][:, :, real], own[:, :count, :count])


@each_component
def test_inputs_embeds(case):
    """Token vectors in place of ids."""
    model = case.shared()
    ids, mask = padded_batch()
    vectors = model.get_input_embeddings()(ids)
    given = {"inputs_embeds": vectors, "attention_mask": mask}
    if case.shape == "seq2seq":
        given.update(decoder_inputs_embeds=vectors, decoder_attention_mask=mask)
    with torch.no_grad():
        close(model(**given).logits, case.run(model, ids, mask), 1e-12)
        with pytest.raises(ValueError, match="exactly one of"):
            model(input_ids=ids, inputs_embeds=vectors)


@each_component
def test_determinism(case):
    """Equal seeds give equal models and equal training passes; evaluation never draws a random number."""
    first, second = (case.build(strong=False, dtype=torch.float32) for _ in range(2))
    for (name, one), (_, other) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    ids = tokens(2, 7)
    with torch.no_grad():
        torch.manual_seed(1)
        once = case.run(first, ids)
        torch.manual_seed(2)
        assert torch.equal(case.run(first, ids), once)
        first.train()
        passes, state = [], copy.deepcopy(first.state_dict())
        for seed in (1, 1, 2):
            first.load_state_dict(state)  # a training pass may move running statistics
            torch.manual_seed(seed)
            passes.append(case.run(first, ids))
    assert torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[0], passes[2]), "dropout does nothing"
    assert not torch.equal(passes[0], once), "evaluation does not switch dropout off"
