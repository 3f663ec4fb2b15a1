"""Contract: no look ahead, and token by token equals the whole sequence at once."""

import pytest
import torch

from tests.common.cases import each_case, each_causal_case, each_causal_part
from tests.helpers import close, pad, tokens

LENGTH = 13


@each_causal_case
def test_causality(case):
    """A changed token changes itself and nothing before it."""
    model, ids = case.shared(), tokens(2, LENGTH)
    source = {} if case.shape == "decoder" else {"input_ids": ids}

    def run(target):
        return case.run(model, target) if not source else model(**source, decoder_input_ids=target).logits

    with torch.no_grad():
        expected = run(ids)
        for place in (0, 1, 6, 12):
            changed = ids.clone()
            changed[:, place] = 5 + (ids[:, place] - 4) % 90
            output = run(changed)
            assert torch.equal(changed == ids, torch.arange(LENGTH).expand(2, -1) != place)
            close(output[:, :place], expected[:, :place], 1e-12)
            assert (output[:, place] - expected[:, place]).abs().max() > 1e-6


@each_causal_case
def test_gradient_causality(case):
    """No gradient flows from an output to a later input."""
    model, ids = case.shared(), tokens(1, 7)
    vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
    if case.shape == "decoder":
        output = model(inputs_embeds=vectors).logits
    else:
        output = model(input_ids=ids, decoder_inputs_embeds=vectors).logits
    (slope,) = torch.autograd.grad(output[:, 3].sum(), vectors)
    assert (slope[:, 4:] == 0).all() and (slope[:, 3] != 0).any()


@each_causal_case
def test_prefixes(case):
    """Every prefix gives what it gives inside the longer text: odd lengths, 1 among them."""
    model, ids = case.shared(), tokens(2, LENGTH)
    with torch.no_grad():
        if case.shape == "decoder":
            expected = case.run(model, ids)
            for length in (1, 2, 7):
                close(case.run(model, ids[:, :length]), expected[:, :length])
        else:
            expected = model(input_ids=ids, decoder_input_ids=ids).logits
            for length in (1, 2, 7):
                close(model(input_ids=ids, decoder_input_ids=ids[:, :length]).logits, expected[:, :length])


@each_case
def test_encoder_looks_both_ways(case):
    """Some earlier token reads the last one (which one, may depend on the content)."""
    if case.shape == "decoder":
        return
    model, ids = case.shared(), tokens(1, 8)
    changed = ids.clone()
    changed[:, -1] = 5 + (ids[:, -1] - 4) % 90
    encoder = model.get_encoder()
    with torch.no_grad():
        before, after = (encoder(input_ids=given).last_hidden_state[:, :-1] for given in (ids, changed))
    assert (before - after).abs().max() > 1e-6


def stepwise(case, model, ids, mask, pieces):
    """Logits [B, T, V] of `ids`, read in pieces with a cache, and that cache."""
    given = {"input_ids": ids, "attention_mask": mask}
    if case.shape == "seq2seq":
        memory = model.get_encoder()(**given)
    cache, done, found = None, 0, []
    for size in pieces:
        piece, seen = ids[:, done : done + size], done + size
        so_far = None if mask is None else mask[:, :seen]
        if case.shape == "seq2seq":
            output = model(
                encoder_outputs=memory,
                attention_mask=mask,
                decoder_input_ids=piece,
                decoder_attention_mask=so_far,
                past_key_values=cache,
                use_cache=True,
            )
        else:
            output = model(input_ids=piece, attention_mask=so_far, past_key_values=cache, use_cache=True)
        cache, done = output.past_key_values, seen
        found.append(output.logits)
        assert cache.get_seq_length() == done
    return torch.cat(found, dim=1), cache


@each_causal_case
@pytest.mark.parametrize("pieces", [(1,) * 9, (5, 1, 1, 2)], ids=["by_token", "by_piece"])
def test_cached_equals_full(case, pieces):
    model, ids = case.shared(), tokens(3, 9)
    with torch.no_grad():
        output, _ = stepwise(case, model, ids, None, pieces)
        close(output, case.run(model, ids))
        padded, mask = pad([ids[0], ids[1, :6], ids[2, :1]], 9, "left", seed=8)
        output, _ = stepwise(case, model, padded, mask, pieces)
        close(output[mask.bool()], case.run(model, padded, mask)[mask.bool()])


@each_causal_part
def test_greedy_generation(case):
    """`generate`, with and without a cache, writes what a full pass over the text itself finds likeliest at each
    place (later tokens do not change that, as the tests above show), for each text of a padded batch."""
    model = case.shared()
    rows = [tokens(5), tokens(2, seed=1), tokens(1, seed=2)]
    batch, mask = pad(rows, 5, "left")
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    outputs = [
        model.generate(input_ids=batch, attention_mask=mask, use_cache=use_cache, **settings)
        for use_cache in (True, False)
    ]
    assert torch.equal(*outputs)
    eos = model.generation_config.eos_token_id
    for index, row in enumerate(rows):
        written = outputs[0][index, -6:]
        with torch.no_grad():
            if case.shape == "decoder":
                logits = model(input_ids=torch.cat([row, written[:-1]])[None], use_cache=False).logits[0, -6:]
            else:
                start = torch.tensor([model.config.decoder_start_token_id])
                text = torch.cat([start, written[:-1]])[None]
                logits = model(input_ids=row[None], decoder_input_ids=text, use_cache=False).logits[0]
        if eos is not None:
            logits[:, eos] = -torch.inf
        assert torch.equal(written, logits.argmax(-1))


@each_causal_part
def test_what_steps_record(case):
    """States and weights of as many layers in each step, whose last are those of the whole text."""
    model, ids = case.shared(implementation="eager"), tokens(1, 9)
    past, whole = None, {} if case.shape == "decoder" else {"input_ids": ids}
    name, states = (
        ("input_ids", "hidden_states") if case.shape == "decoder" else ("decoder_input_ids", "decoder_hidden_states")
    )
    with torch.no_grad():
        expected = model(**whole, **{name: ids}, output_hidden_states=True)[states]
        for begin, end in ((0, 4), (4, 5), (5, 6), (6, 7)):
            output = model(
                **whole, **{name: ids[:, begin:end]}, past_key_values=past, use_cache=True, output_hidden_states=True
            )
            past, found = output.past_key_values, output[states]
            assert len(found) == len(expected)
            close(found[-1], expected[-1][:, begin:end])


@each_causal_part
def test_beam_search(case):
    """Beams reorder the cache."""
    model = case.shared()
    batch, mask = pad([tokens(5), tokens(3, seed=1)], 5, "left")
    settings = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "num_return_sequences": 2}
    settings.update(output_scores=True, return_dict_in_generate=True)
    cached, full = (
        model.generate(input_ids=batch, attention_mask=mask, use_cache=use_cache, **settings)
        for use_cache in (True, False)
    )
    assert torch.equal(cached.sequences, full.sequences)
    close(cached.sequences_scores, full.sequences_scores, 1e-6)


@each_causal_part
def test_sampling_is_seeded(case):
    model, ids = case.shared(), tokens(2, 4)
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(input_ids=ids, do_sample=True, max_new_tokens=4, min_new_tokens=4))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
