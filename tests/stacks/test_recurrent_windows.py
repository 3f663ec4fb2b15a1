"""Windows that carry one key: loops by hand, padding, caches, and gradients over windows."""

import pytest
import torch

from hf_xformers.conversion import swap_components
from hf_xformers.training.replay import replay_backward
from hf_xformers.variants.gpt2 import XFGPT2Config, XFGPT2ForCausalLM
from hf_xformers.variants.recurrent_pretrained_lm import (
    XFRecurrentPretrainedLMConfig,
    XFRecurrentPretrainedLMForCausalLM,
)
from tests.helpers import NO_DROPOUT, close, close_gradients, gradients, make_strong, pad, tokens
from tests.stacks.test_segment_recurrent import check_refused_memories

WINDOW = 5
SIZES = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 8,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 0,
}


def build(fields=None, **stack):
    torch.manual_seed(0)
    config = XFRecurrentPretrainedLMConfig(
        **SIZES, **NO_DROPOUT, **(fields or {}), stack={"type": "recurrent_windows", **stack}
    )
    return make_strong(XFRecurrentPretrainedLMForCausalLM(config).double().eval(), amount=0.3)


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, use_cache=False, **inputs).logits


def by_hand(model, ids, extract, insert, pooling="mean"):
    """One row [T], window by window, head by head, with the equations of GPT-2 and the paper."""
    trunk, heads = model.model.trunk, 2
    stack, carried, found = trunk.stack, None, []
    for window in ids.split(WINDOW):
        states = trunk.embedding.tokens(window) + trunk.position.table.weight[: len(window)]
        for depth, layer in enumerate(trunk.layers):
            attention, entered = layer.attention, layer.attention_residual.norm(states)
            query, key, value = (proj(entered) for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
            read = torch.zeros_like(states)
            for t in range(len(window)):
                for head in range(heads):
                    part = slice(head * 8, head * 8 + 8)
                    keys, values = list(key[: t + 1, part]), list(value[: t + 1, part])
                    if depth == insert and carried is not None:
                        vector = carried
                        for linear in stack.recurrence.layers:
                            vector = torch.nn.functional.gelu(linear(vector))
                        keys.append(stack.recurrence.k_proj(vector)[part])
                        values.append(stack.recurrence.v_proj(vector)[part])
                    weights = torch.softmax(torch.stack([query[t, part] @ one for one in keys]) / 8**0.5, 0)
                    read[t, part] = sum(weight * one for weight, one in zip(weights, values))
            states = states + attention.o_proj(read)
            entered = layer.feedforward_residual.norm(states)
            up = torch.nn.functional.gelu(layer.feedforward.up_proj(entered), approximate="tanh")
            states = states + layer.feedforward.down_proj(up)
            if depth == extract:
                pooled = states.mean(0) if pooling == "mean" else states[-1]
        carried = pooled
        found.append(model.lm_head(trunk.final_norm(states)))
    return torch.cat(found), carried


@pytest.mark.parametrize(
    "stack", [{}, {"extract_layer": 0, "insert_layer": 2, "pooling": "last", "recurrence_layers": 1}]
)
def test_equation(stack):
    model, ids = build(**stack), tokens(13)
    with torch.no_grad():
        expected, carried = by_hand(
            model, ids, stack.get("extract_layer", 2), stack.get("insert_layer", 1), stack.get("pooling", "mean")
        )
        output = model(ids[None], use_cache=False)
    close(output.logits[0], expected, 1e-10)
    close(output.segment_memory.states[0][0, 0], carried, 1e-10)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        close(logits(model, ids[None])[0], expected, 1e-10)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_padding_and_memory(side, pooling):
    """Windows are counted from a row's first real token, wherever it is padded, in one call and over several."""
    model, rows = build(pooling=pooling), [tokens(16)[:length] for length in (16, 7, 5, 1)]
    start = model(tokens(5, 6, seed=7), use_cache=False).segment_memory
    with torch.no_grad():
        alone = [
            model(row[None], segment_memory=start.reorder(torch.tensor([i])), use_cache=False)
            for i, row in enumerate(rows)
        ]
        for length in (16, 17):
            ids, mask = pad([*rows, rows[0][:0]], length, side, seed=3)
            output = model(ids, attention_mask=mask, segment_memory=start, use_cache=False)
            for index, (row, expected) in enumerate(zip(rows, alone)):
                close(output.logits[index][mask[index].bool()], expected.logits[0], 1e-10)
                close(output.segment_memory.states[0][index], expected.segment_memory.states[0][0], 1e-10)
            close(output.segment_memory.states[0][4], start.states[0][4], 1e-12)
        whole, first = model(rows[0][None], use_cache=False), model(rows[0][None, :10], use_cache=False)
        later = model(rows[0][None, 10:], segment_memory=first.segment_memory, use_cache=False)
        close(later.logits, whole.logits[:, 10:], 1e-10)  # windows of a call after windows of another
        reset = first.segment_memory.reset(torch.tensor([True]))
        close(logits(model, rows[0][None, 10:], segment_memory=reset), logits(model, rows[0][None, 10:]), 1e-12)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("fields", [{}, {"position": "rotary"}])
def test_cache(side, fields):
    """Token by token, and in chunks, over several windows, whose ends differ from row to row."""
    model, rows = build(fields), [tokens(17)[:length] for length in (9, 6, 2)]
    memory = model(tokens(3, 4, seed=5), use_cache=False).segment_memory
    following = tokens(3, 8, seed=4)
    with torch.no_grad():
        ids, mask = pad(rows, 9, side, seed=3)
        for chunks in ([1] * 8, [3, 1, 4], [8]):
            output = model(ids, attention_mask=mask, segment_memory=memory, use_cache=True)
            cache, found, seen = output.past_key_values, [output.logits], mask
            for chunk in following.split(chunks, 1):
                seen = torch.cat([seen, torch.ones_like(chunk)], 1)
                output = model(chunk, attention_mask=seen, past_key_values=cache, use_cache=True)
                found.append(output.logits)
                assert all(layer.stored <= WINDOW for layer in cache.layers)
            found = torch.cat(found, 1)
            for index, row in enumerate(rows):
                text = torch.cat([row, following[index]])[None]
                one = memory.reorder(torch.tensor([index]))
                close(found[index][seen[index].bool()], logits(model, text, segment_memory=one)[0], 1e-9)


def test_gradients_go_through_windows():
    """The last window teaches the first unless gradients end between them; making activations again changes none."""
    ids, found = tokens(1, 15), {}
    for name, stack in {"all": {}, "kept": {"checkpoint_windows": False}, "cut": {"detach_every": 1}}.items():
        model = build(**stack).train()
        vectors = model.model.trunk.embedding.tokens(ids).detach().requires_grad_()
        output = model(inputs_embeds=vectors, use_cache=False).logits[:, 10:]
        found[name] = torch.autograd.grad(output.sum(), vectors, retain_graph=True)[0], gradients(model, output)
    close(found["all"][0], found["kept"][0], 1e-10)
    close_gradients(found["all"][1], found["kept"][1], 1e-10)
    assert (found["all"][0][0].abs().amax(-1) > 0).all()
    assert (found["cut"][0][0, :10] == 0).all() and (found["cut"][0][0, 10:].abs().amax(-1) > 0).all()
    model = build().train()
    model.gradient_checkpointing_enable()
    output = model(inputs_embeds=vectors, use_cache=False).logits[:, 10:]
    close_gradients(gradients(model, output), found["all"][1], 1e-10)


def test_replay_is_back_propagation_through_calls():
    """Over calls of two windows each; dropout draws the same numbers both times."""
    model, ids = build(), tokens(2, 30)
    parts = [{"input_ids": part, "labels": part, "use_cache": False} for part in ids.split(10, 1)]
    memory, losses = None, []
    for part in parts:
        output = model(**part, segment_memory=memory)
        memory = output.segment_memory
        losses.append(output.loss)
    sum(losses).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    replay_backward(model, parts)
    close_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, expected, 1e-10)


def test_it_starts_as_the_checkpoint():
    """A saved GPT-2 of ours on its first window, and the same folder under the family's own class."""
    torch.manual_seed(0)
    source = make_strong(XFGPT2ForCausalLM(XFGPT2Config(**SIZES)).double().eval(), amount=0.3)
    model, _ = swap_components(source, stack="recurrent_windows", measure=False)
    ids = tokens(2, WINDOW)
    close(logits(model.double(), ids), logits(source, ids), 1e-12)


def test_refused_memories():
    model = build()
    check_refused_memories(model)
    with pytest.raises(ValueError, match="one document per row"):
        model(tokens(1, 8), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]))


def test_what_is_kept_for_the_backward_pass_is_a_window():
    """Beside each window's own input, no more for many windows than for few."""
    model, kept = build().train(), {}
    for windows in (2, 8, 32):
        vectors, sizes = torch.randn(1, windows * WINDOW, 16).double().requires_grad_(), [0]

        def count(tensor, sizes=sizes):
            sizes[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = model.model(inputs_embeds=vectors, use_cache=False)[0]
        kept[windows] = sizes[0] / windows
        output.sum().backward()
    assert kept[32] <= kept[8] <= kept[2]
