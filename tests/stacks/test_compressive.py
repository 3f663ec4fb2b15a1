"""The compressive memory: what is compressed, and who learns from what."""

import pytest
import torch

from hf_xformers.core.cache import make_cache
from hf_xformers.core.segment_memory import CompressiveMemory, SegmentMemory
from tests.attention.score_helpers import HEADS, WIDTH
from tests.helpers import close, pad, tokens
from tests.stacks.test_segment_recurrent import build as build_xl
from tests.stacks.test_segment_recurrent import check_rows_of_any_length, in_segments

D = WIDTH // HEADS


def build(memory_length=4, compressed_length=3, rate=2, compression="mean", weight=1.0, **fields):
    stack = {
        "type": "compressive",
        "memory_length": memory_length,
        "compressed_length": compressed_length,
        "compression_rate": rate,
        "compression": compression,
        "reconstruction_weight": weight,
    }
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return build_xl(stack=stack, **{**no_dropout, **fields})


@pytest.mark.parametrize("compression", ["mean", "max", "conv"])
@pytest.mark.parametrize("lengths", [(5, 4, 3, 1, 6), (1,) * 12])
def test_slots(compression, lengths):
    """Every slot by itself: oldest states first, whole groups, at least n_m left."""
    model, ids, rate = build(4, 3, 2, compression), tokens(2, sum(lengths)), 2
    memory, begin = None, 0
    recent = [torch.zeros(2, 0, WIDTH, dtype=torch.float64)] * 2
    slots = [torch.zeros(2, 0, WIDTH, dtype=torch.float64)] * 2
    with torch.no_grad():
        for length in lengths:
            output = model(
                ids[:, begin : begin + length], segment_memory=memory, use_cache=False, output_hidden_states=True
            )
            memory, begin = output.segment_memory, begin + length
            for step in range(2):
                recent[step] = torch.cat([recent[step], output.hidden_states[step]], 1)
                while recent[step].shape[1] - rate >= 4:
                    group, recent[step] = recent[step][:, :rate], recent[step][:, rate:]
                    if compression == "mean":
                        new = (group[:, 0] + group[:, 1]) / 2
                    elif compression == "max":
                        new = torch.maximum(group[:, 0], group[:, 1])
                    else:
                        conv = model.model.trunk.stack.compressions[step].conv
                        new = sum(group[:, k] @ conv.weight[:, :, k].t() for k in range(rate)) + conv.bias
                    slots[step] = torch.cat([slots[step], new[:, None]], 1)[:, -3:]
                close(memory.states[step], recent[step], 1e-12)
                if slots[step].shape[1]:
                    close(memory.compressed[step], slots[step], 1e-12)


def trained(model, ids, lengths):
    """Outputs of consecutive segments in training mode."""
    model.train()
    memory, begin, outputs = None, 0, []
    for length in lengths:
        piece = ids[:, begin : begin + length]
        outputs.append(model(piece, labels=piece, segment_memory=memory, use_cache=False))
        memory, begin = outputs[-1].segment_memory, begin + length
    return outputs


@pytest.mark.parametrize("residual", ["post_ln", "pre_ln"])
def test_who_learns_from_what(residual):
    model, ids = build(4, 3, 2, "conv", residual=residual), tokens(2, 18)
    outputs = trained(model, ids, (6, 6, 6))
    last = outputs[-1]
    named = dict(model.named_parameters())
    ours = {name for name in named if "compressions" in name}
    loss = last.aux_losses["reconstruction"]
    assert last.segment_memory.compressed[0].requires_grad is False
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    for name, slope in zip(named, found):
        assert (slope is not None and slope.abs().max() > 0) == (name in ours), name
    task = last.loss - loss
    found = torch.autograd.grad(task, list(named.values()), allow_unused=True)
    for name, slope in zip(named, found):
        if "k_proj.bias" not in name:  # which shifts all scores of a query alike
            assert (slope is None or slope.abs().max() < 1e-14) == (name in ours), name
    with torch.no_grad():
        assert model(ids[:, :6]).aux_losses is None


def test_reconstruction_loss_is_that_of_the_paper():
    """Head by head from the definition, on the states that left the memory."""
    model, ids, rate = build(4, 3, 2, "conv", weight=0.5), tokens(2, 10), 2
    model.train()
    first = model(ids[:, :5], use_cache=False)
    assert first.aux_losses["reconstruction"].item() == 0 and first.segment_memory.length == 5
    second = model(ids[:, 5:], segment_memory=first.segment_memory, use_cache=False, output_hidden_states=True)
    total = 0.0
    for step, layer in enumerate(model.model.trunk.layers):
        states, attention = second.hidden_states[step], layer.attention
        old = torch.cat([first.segment_memory.states[step], states], 1)[:, :6]
        conv = model.model.trunk.stack.compressions[step].conv
        pairs = [(old[:, 2 * n], old[:, 2 * n + 1]) for n in range(3)]
        slots = torch.stack(
            [a @ conv.weight[:, :, 0].t() + b @ conv.weight[:, :, 1].t() + conv.bias for a, b in pairs], 1
        )
        for head in range(HEADS):
            part = slice(head * D, (head + 1) * D)

            def attend(memory):
                query, key, value = (
                    getattr(attention, name)(x)[..., part]
                    for name, x in (("q_proj", states), ("k_proj", memory), ("v_proj", memory))
                )
                return torch.softmax(query @ key.mT / D**0.5, -1) @ value

            total = total + (attend(old) - attend(slots)).pow(2).sum() / (2 * 5 * WIDTH)
    close(second.aux_losses["reconstruction"].double(), 0.5 * total, 1e-6)
    assert rate == 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_most_used(implementation):
    """The slots are those states that got the most attention since they were written, in the order of the text."""
    model, ids = build(2, 4, 2, "most_used"), tokens(1, 12)
    model.config._attn_implementation = implementation
    memory, begin = None, 0
    recent, usage, slots = [[], []], [[], []], [[], []]
    with torch.no_grad():
        for length in (4, 4, 4):
            given = {"segment_memory": memory, "use_cache": False, "output_hidden_states": True}
            piece = ids[:, begin : begin + length]
            weights = model(piece, output_attentions=True, **given).attentions
            output = model(piece, **given)
            memory, begin = output.segment_memory, begin + length
            for step in range(2):
                got = weights[step][0].sum((0, 1))[len(slots[step]) :]
                recent[step] += list(output.hidden_states[step][0])
                usage[step] = [a + b for a, b in zip(usage[step] + [0.0] * length, got, strict=True)]
                count = max(len(recent[step]) - 2, 0) // 2 * 2
                ranked = sorted(range(count), key=lambda place: -usage[step][place])[: count // 2]
                slots[step] = (slots[step] + [recent[step][place] for place in sorted(ranked)])[-4:]
                recent[step], usage[step] = recent[step][count:], usage[step][count:]
                close(memory.compressed[step][0], torch.stack(slots[step]), 1e-12)
                close(memory.usage[step][0], torch.stack(usage[step]), 1e-10)


@pytest.mark.parametrize("compression", ["conv", "dilated", "most_used", "max"])
def test_padding_never_enters(compression):
    check_rows_of_any_length(build(3, 2, 2, compression))


def test_padding_has_no_reconstruction_loss():
    model = build(3, 2, 2, "conv")
    ids = tokens(1, 14)
    alone = trained(model, ids, (7, 7))[-1].aux_losses["reconstruction"]
    padded, mask = pad([ids[0, :7], tokens(2, seed=5)], 9, "left", seed=3)
    first = model(padded, attention_mask=mask, use_cache=False).segment_memory
    padded, mask = pad([ids[0, 7:], tokens(0)], 9, "right", seed=4)
    both = model(padded, attention_mask=mask, segment_memory=first, use_cache=False).aux_losses["reconstruction"]
    close(both, alone, 1e-6)


def test_rows_reset():
    model, ids = build(3, 2, 2), tokens(2, 12)
    with torch.no_grad():
        _, memory = in_segments(model, ids, (6, 6))
        assert isinstance(memory, CompressiveMemory) and memory.compressed_length == 2
        later = tokens(2, 9, seed=3)
        reset = in_segments(model, later, (5, 4), memory.reset(torch.tensor([True, False])))[0]
        close(reset[:1], in_segments(model, later[:1], (5, 4))[0], 1e-10)
        close(reset[1:], in_segments(model, later, (5, 4), memory)[0][1:], 1e-10)


@pytest.mark.parametrize("compression", ["mean", "most_used"])
def test_cache(compression):
    """With a cache every call is a segment; generation equals a loop over them, padded rows and beams included."""
    model, ids = build(3, 2, 2, compression), tokens(2, 12)
    cache = make_cache(model.config)
    with torch.no_grad():
        steps = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(12)]
        close(torch.cat(steps, 1), in_segments(model, ids, (1,) * 12)[0], 1e-10)
        assert cache.get_seq_length() == 12
        padded, mask = pad([ids[0, :6], ids[1, :3]], 6, "left", seed=2)
        settings = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
        texts = model.generate(padded, attention_mask=mask, **settings)
        for index, prompt in enumerate((ids[:1, :6], ids[1:, :3])):
            output, text = model(prompt, use_cache=False), []
            for _ in range(9):
                scores = output.logits[:, -1].clone()
                if model.generation_config.eos_token_id is not None:
                    scores[:, model.generation_config.eos_token_id] = -torch.inf
                text.append(scores.argmax(-1))
                output = model(text[-1][:, None], segment_memory=output.segment_memory, use_cache=False)
            assert torch.equal(texts[index, 6:], torch.cat(text))
        beams = model.generate(padded, attention_mask=mask, num_beams=3, **settings)
        alone = model.generate(ids[1:, :3], num_beams=3, **settings)
        assert torch.equal(beams[1:, 6:], alone[:, 3:])


def test_dilated_convolution():
    """Slot by slot: every second state back from the last of the group; what is not there is zero."""
    rate, length = 3, 6
    compress = build(rate=rate, compression="dilated").model.trunk.stack.compressions[0]
    states = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.tensor([[False] * 3 + [True] * 3])
    weight, bias = compress.conv.weight, compress.conv.bias
    for real in (None, mask):
        found = compress(states, real, None)
        for slot in range(length // rate):
            total = bias.clone()
            for tap in range(rate):
                place = slot * rate + rate - 1 - 2 * (rate - 1 - tap)
                if place >= 0 and (real is None or real[0, place]):
                    total = total + weight[:, :, tap] @ states[0, place]
            if real is None or slot == 1:
                close(found[0, slot], total, 1e-12)


@pytest.mark.parametrize("compression", ["conv", "dilated"])
def test_autoencoding(compression):
    """(old - g(f_c(old)))^2 over real states, and it alone teaches f_c and g."""
    model, ids = (
        build_xl(
            stack={
                **{"type": "compressive", "memory_length": 4, "compressed_length": 3, "compression_rate": 2},
                **{"compression": compression, "reconstruction": "autoencode", "reconstruction_weight": 0.5},
            }
        ),
        tokens(2, 10),
    )
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    first = model(ids[:, :5], attention_mask=mask, use_cache=False)
    second = model(
        ids[:, 5:], segment_memory=first.segment_memory, use_cache=False, labels=ids[:, 5:], output_hidden_states=True
    )
    total = 0.0
    for step in range(2):
        memory, compress = first.segment_memory.states[step], model.model.trunk.stack.compressions[step]
        rows = [torch.cat([memory[0], second.hidden_states[step][0]])[:6]]
        rows.append(torch.cat([memory[1][2:], second.hidden_states[step][1]])[:4])
        errors = []
        for old in rows:
            old = old[None].detach()
            slots = compress(old, None, None)
            weight, bias = compress.decoder.weight, compress.decoder.bias
            given = torch.stack([slot @ weight[:, :, tap] + bias for slot in slots[0] for tap in range(2)])
            errors.append((old[0] - given).pow(2))
        total = total + torch.cat(errors).mean()
    loss = second.aux_losses["reconstruction"]
    close(loss.double(), 0.5 * total, 1e-6)
    named = dict(model.named_parameters())
    for value, ours in ((loss, True), (second.loss - loss, False)):
        slopes = torch.autograd.grad(value, list(named.values()), allow_unused=True, retain_graph=True)
        for name, slope in zip(named, slopes):
            if "compressions" in name or ours:
                assert (slope is not None and slope.abs().max() > 1e-14) == (ours and "compressions" in name), name


def test_refusals():
    model, ids = build(), tokens(2, 4)
    with pytest.raises(TypeError, match="CompressiveMemory"):
        model(ids, segment_memory=SegmentMemory())
