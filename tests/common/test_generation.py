"""Contract: no look ahead, and token by token equals the whole sequence at once."""

import pytest
import torch

from tests.common.cases import CASES, PARTS, components, covering, each_causal_component, each_causal_part
from tests.helpers import close, pad, tokens

LENGTH = 13


@each_causal_part
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


@each_causal_component
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


@pytest.mark.parametrize("case", [case for case in PARTS if case.shape != "decoder"], ids=str)
def test_encoder_looks_both_ways(case):
    """Some earlier token reads the last one (which one, may depend on the content)."""
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


@each_causal_part
def test_cached_equals_full(case, pieces=None):
    """By token and by piece, and with padding on the left."""
    model, ids = case.shared(), tokens(3, 9)
    padded, mask = pad([ids[0], ids[1, :6], ids[2, :1]], 9, "left", seed=8)
    with torch.no_grad():
        whole, real = case.run(model, ids), case.run(model, padded, mask)[mask.bool()]
        for sizes in [pieces] if pieces else [(1,) * 9, (5, 1, 1, 2)]:
            output, _ = stepwise(case, model, ids, None, sizes)
            close(output, whole)
            output, _ = stepwise(case, model, padded, mask, sizes)
            close(output[mask.bool()], real)


@each_causal_component
def test_cached_after_padding_anywhere(case):
    """Texts are continued from a cache wherever their padding stands: behind a text, or between virtual tokens and
    it, as peft puts them."""
    for behind in ("padding", "virtual_tokens"):
        continue_a_padded_text(case, behind)


def continue_a_padded_text(case, behind):
    model, rows, more = case.shared(), [tokens(length, seed=length) for length in (6, 3, 4)], tokens(3, 3, seed=8)
    ids, mask = pad(rows, 6, "right", seed=9)
    if behind == "virtual_tokens":
        ids, mask = (torch.cat((x[:, :2], x.flip(0)[:, 2:]), 1) for x in (ids, mask.flip(1)))
        mask[:, :2] = 1
    source = {} if case.shape == "decoder" else {"input_ids": tokens(3, 5, seed=2)}
    name = "decoder_" if source else ""

    def run(row, ids, mask=None, **options):
        given = {f"{name}input_ids": ids, **{key: x if row is None else x[[row]] for key, x in source.items()}}
        return model(**given, **({} if mask is None else {f"{name}attention_mask": mask}), **options)

    with torch.no_grad():
        output = run(None, ids, mask, use_cache=True)
        found, mask_of_texts = [output.logits], mask
        for place in range(3):
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
            output = run(None, more[:, [place]], mask, use_cache=True, past_key_values=output.past_key_values)
            found.append(output.logits)
        found = torch.cat(found, 1)
        for row in range(3):
            alone = torch.cat((ids[row][mask_of_texts[row].bool()], more[row]))
            close(found[row][mask[row].bool()], run(row, alone[None], use_cache=False).logits[0])


@each_causal_component
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


@each_causal_component
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


@each_causal_component
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


def stacks(case):
    return {name for slot, name, _, _ in components(case) if slot == "stack"}


@pytest.mark.parametrize("case", covering([case for case in PARTS if case.causal], stacks), ids=str)
def test_sampling_is_seeded(case):
    model, ids = case.shared(), tokens(2, 4)
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(input_ids=ids, do_sample=True, max_new_tokens=4, min_new_tokens=4))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


SECOND_TURNS = {  # (a decoder, whether its cache can move slots): keys and values, a state without slots, windows
    "xf_gpt2": True, "xf_shaw_relative": True, "score_bias_post_ln": True, "xf_linear_transformer": True,
    "xf_lite_transformer": False, "xf_gpt3_alternating": False, "lolcats": False,
}  # fmt: skip


@pytest.mark.parametrize("name, moves", SECOND_TURNS.items())
def test_second_turns_of_other_lengths(name, moves):
    """A second turn that is padded after cached tokens, and a token behind it."""
    case = next(case for case in CASES if (case.name, case.shape) == (name, "decoder"))
    model, texts, turns = case.shared(), tokens(2, 5, seed=1), [tokens(3, seed=2), tokens(1, seed=3)]
    ids, mask = pad(turns, 3, "left", seed=4)
    mask, last = torch.cat((torch.ones_like(texts), mask), 1), tokens(2, 1, seed=5)
    with torch.no_grad():
        past = model(texts, use_cache=True).past_key_values
        if not moves:
            with pytest.raises(ValueError, match="cannot move apart again; give each row"):
                model(ids, attention_mask=mask, past_key_values=past)
            return
        turn = model(ids, attention_mask=mask, past_key_values=past).logits
        mask = torch.cat((mask, torch.ones_like(last)), 1)
        after = model(last, attention_mask=mask, past_key_values=past).logits
        for row, text in enumerate(texts):
            length = len(turns[row])
            alone = case.run(model, torch.cat((text, turns[row], last[row]))[None], use_cache=False)[0, 5:]
            close(torch.cat((turn[row, -length:], after[row])), alone)


def test_what_is_recorded_stands_where_the_caller_has_it():
    case = next(case for case in CASES if str(case) == "xf_gpt2-decoder")
    model, ids = case.shared(implementation="eager"), tokens(1, 7)
    places = torch.tensor([0, 1, 5, 6, 7, 8, 9])
    padded, mask = tokens(1, 10, seed=5), torch.zeros(1, 10).long()
    padded[:, places], mask[:, places] = ids, 1
    asked = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    with torch.no_grad():
        found, alone = model(padded, attention_mask=mask, **asked), model(ids, **asked)
    for one, other in zip(found.hidden_states, alone.hidden_states, strict=True):
        close(one[:, places], other)
    for one, other in zip(found.attentions, alone.attentions, strict=True):
        close(one[:, :, places][..., places], other)


def test_a_static_cache_refuses_padding_between_tokens():
    case = next(case for case in CASES if str(case) == "xf_gpt2-decoder")
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="leave `cache_implementation` out"):
        case.shared().generate(
            tokens(1, 7), attention_mask=mask, max_new_tokens=2, cache_implementation="static", pad_token_id=0
        )


@pytest.mark.parametrize("name", ["xf_image_gpt-decoder", "modern-decoder", "modern-seq2seq"])
@torch.no_grad()
def test_scores_of_what_was_written(name):
    """By transformers' `compute_transition_scores`, of heads with fewer or other ids than `vocab_size`, too."""
    case = next(case for case in CASES if str(case) == name)
    model = case.build(**({"decoder_vocab_size": 130} if case.shape == "seq2seq" else {}))
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    asked = {"output_scores": True, "return_dict_in_generate": True}
    written = model.generate(tokens(2, 5), **settings, **asked)
    new = written.sequences[:, -4:]
    for normalized in (False, True):
        scores = [step.log_softmax(-1) if normalized else step for step in written.scores]
        expected = torch.stack([step.gather(1, new[:, place, None])[:, 0] for place, step in enumerate(scores)], 1)
        found = model.compute_transition_scores(written.sequences, written.scores, normalize_logits=normalized)
        close(found, expected, 1e-5)
    written = model.generate(tokens(2, 5), num_beams=3, length_penalty=0.0, **settings, **asked)
    found = model.compute_transition_scores(written.sequences, written.scores, written.beam_indices)
    close(found.sum(1), written.sequences_scores, 1e-5)
