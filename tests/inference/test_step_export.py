"""One step of a decoder as a graph: greedy decoding with it gives the very tokens of `generate`."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.export import export_step, export_step_onnx
from hf_xformers.export.state import around, leaves
from hf_xformers.export.step import _save_start
from tests.common.cases import CASES
from tests.helpers import pad, tokens

# One family, or mix, for each kind of state.
KINDS = {
    "keys and values": "xf_gpt2",
    "a window": "xf_longformer",
    "linear sums": "xf_linear_transformer",
}
FURTHER = {
    "a window and the first tokens": "windows_and_norms",
    "memory of earlier segments": "xf_transformer_xl",
    "a memory of all layers": "xf_feedback_transformer",
    "buckets": "xf_routing_transformer",
    "last ids": "xf_hash_layers",
    "keys alone in place of their means": "xf_native_sparse_attention",
}


# Their states are of all layers together, or their layers differ.
DEEP = ("xf_feedback_transformer", "windows_and_norms")


def model_of(name, shape="decoder", **changes):
    return next(case for case in CASES if str(case) == f"{name}-{shape}").build(dtype=torch.float32, **changes).eval()


def shallow(name, shape="decoder"):
    """One layer: its graph is traced in half the time, and a second one has another state of the same kind. That
    states of two layers are not mistaken for each other, the quick ones show."""
    return model_of(name, shape, **({} if name in DEEP else {"num_hidden_layers": 1}))


def given_texts():
    return pad([tokens(9), tokens(4, seed=1), tokens(1, seed=2)], 9, "left")


def decoded(step, start, settled, ids, mask, new):
    """[B, new] ids: the prompt is read token by token, and what is likeliest goes on."""
    states, seen, token, found = start, mask.new_zeros(ids.shape[0], settled), None, []
    for place in range(ids.shape[1] + new - 1):
        prompt = place < ids.shape[1]
        token = ids[:, place : place + 1] if prompt else token
        seen = torch.cat((seen, mask[:, place : place + 1] if prompt else mask.new_ones(len(ids), 1)), 1)
        logits, states = step(token, seen, states)
        token = logits.argmax(-1, keepdim=True)
        if place >= ids.shape[1] - 1:
            found.append(token)
    return torch.cat(found, 1)


def generated(model, ids, mask, new=20):
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[:, ids.shape[1] :]


NAMES = [*KINDS.values(), *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER.values())]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_generate(name):
    """Padded prompts of 9, 4 and 1 tokens, and 20 more each: beyond every window and segment of these models."""
    make = model_of if name in KINDS.values() else shallow
    model, (ids, mask) = make(name), given_texts()
    step = export_step(model)
    assert step.difference < 1e-4
    found = decoded(step, step.start(3), step.settled, ids, mask, 20)
    assert torch.equal(found, generated(model, ids, mask))


@pytest.mark.parametrize("name", ["xf_linear_transformer", pytest.param("xf_longformer", marks=pytest.mark.slow)])
def test_onnx_without_the_model(name, tmp_path):
    """From the two files alone."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, (ids, mask) = shallow(name), given_texts()
    report = export_step_onnx(model, tmp_path / "step.onnx")
    assert report.difference < 1e-4 and not any(state.grows for state in report.states)
    assert {path.name for path in tmp_path.iterdir()} == {"step.onnx", "step.start.safetensors"}
    session, begin = onnxruntime.InferenceSession(report.path), load_file(report.start)
    names = [state.name for state in report.states]

    def step(token, seen, states):
        given = {"input_ids": token, "attention_mask": seen, **dict(zip(names, states))}
        wanted = ["logits", *(f"next.{name}" for name in names)]
        read = {entry.name for entry in session.get_inputs()}
        found = session.run(wanted, {key: x.numpy() for key, x in given.items() if key in read})
        logits, *states = map(torch.from_numpy, found)
        return logits, states

    start = [begin[state.name].repeat_interleave(3, dim=state.axis) for state in report.states]
    assert torch.equal(decoded(step, start, report.settled, ids, mask, 20), generated(model, ids, mask))


def session_of(path):
    """A graph under onnxruntime as a function of named tensors, and what it gives by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    read, names = ({entry.name for entry in session.get_inputs()}, [entry.name for entry in session.get_outputs()])

    def call(**given):
        found = session.run(names, {name: x.numpy() for name, x in given.items() if name in read})
        return dict(zip(names, map(torch.from_numpy, found)))

    return call


def test_an_encoder_before_the_decoder(tmp_path):
    """From the two files alone: texts of other lengths and another batch than the traced ones, some padded; no step
    gives the memory out again."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = shallow("xf_t5", "seq2seq")
    report = export_step_onnx(model, tmp_path / "step.onnx")
    assert report.difference < 1e-4
    assert {path.name for path in tmp_path.iterdir()} == {"step.onnx", "step.start.onnx"}
    opened, once = session_of(report.start), session_of(report.path)
    kept = [state for state in report.states if state.of_memory]
    assert {state.name for state in kept} >= {"encoder_attention_mask", "cross_attention_cache.layers.0.keys"}
    model.generation_config.eos_token_id = None
    for lengths in ((9, 4, 1), (12,)):
        ids, mask = pad([tokens(length, seed=seed) for seed, length in enumerate(lengths)], max(lengths), "right")
        states, seen = opened(input_ids=ids, attention_mask=mask), mask.new_zeros(len(ids), report.settled)
        found = token = torch.full((len(ids), 1), model.config.decoder_start_token_id)
        for _ in range(12):
            seen = torch.cat((seen, seen.new_ones(len(ids), 1)), 1)
            given = once(decoder_input_ids=token, decoder_attention_mask=seen, **states)
            # Or a tied output table would give the first token again and again.
            token = given.pop("logits").scatter(1, found, -torch.inf).argmax(-1, keepdim=True)
            assert len(given) == len(report.states) - len(kept)
            states |= {name.removeprefix("next."): x for name, x in given.items()}
            found = torch.cat((found, token), 1)
        settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "no_repeat_ngram_size": 1}
        assert torch.equal(found, model.generate(ids, attention_mask=mask, **settings))
        assert len(ids) == 1 or not torch.equal(found[0], found[1]), "what the encoder reads makes no difference"


def test_a_state_of_constant_size_stays_one():
    """Shapes say what grows: one axis of keys and values, none of sums."""
    for name, grows in (("xf_gpt2", True), ("xf_linear_transformer", False)):
        step = export_step(shallow(name))
        assert all(state.grows == grows for state in step.states)
        token, mask = torch.full((2, 1), 7), torch.ones(2, step.settled + 1, dtype=torch.long)
        _, after = step(token, mask, step.start(2))
        for state, before, now in zip(step.states, step.start(2), after, strict=True):
            assert list(before.shape) == state.sizes(2, step.settled)
            assert list(now.shape) == state.sizes(2, step.settled + 1)


def test_a_changed_state_changes_the_tokens():
    """The graph reads its state: without it logits are others."""
    step = export_step(shallow("xf_linear_transformer"))
    token, mask = torch.full((1, 1), 7), torch.ones(1, step.settled + 3, dtype=torch.long)
    _, states = step(token, mask[:, :-2], step.start(1))
    _, states = step(token + 1, mask[:, :-1], states)
    right, _ = step(token, mask, states)
    wrong, _ = step(token, mask, [torch.zeros_like(state) for state in states])
    assert (right - wrong).abs().max() > 1e-2


def test_taking_a_cache_apart_and_together():
    from hf_xformers.export.state import read, sample

    model = model_of("windows_and_norms")
    cache = read(model, sample(model, 2, 7)).cache
    held = dict(leaves(cache))
    assert "layers.0.sinks.0" in held and held["layers.0.cumulative_length"] == 7
    other = around(cache, {name: x + 1 for name, x in held.items()})
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(held[name] + 1)) for name, x in leaves(other))
    assert all(x is held[name] for name, x in leaves(cache) if isinstance(x, torch.Tensor)), "the old one stays"


def test_refusals(tmp_path):
    encoder = next(case for case in CASES if str(case) == "xf_bert-encoder").shared(torch.float32)
    with pytest.raises(ValueError, match="generates nothing, step by step; export it whole"):
        export_step(encoder)
    with pytest.raises(ValueError, match="the model is in torch.bfloat16; give `model.float"):
        export_step(shallow("xf_gpt2").bfloat16())
    with pytest.raises(TypeError, match="PeftModelForCausalLM is no model of hf_xformers, .* `merge_and_unload"):
        export_step(get_peft_model(shallow("xf_gpt2"), LoraConfig(task_type="CAUSAL_LM")))
    with pytest.raises(ValueError, match="no encoder to read a text before the first token; take `start`"):
        export_step(model_of("xf_linear_transformer")).start_on(*given_texts())
    with pytest.raises(ValueError, match=r"no graph of one step .*`layers.0.state.keys, axis 2` .* neither constant"):
        export_step(model_of("xf_memory_compressed_attention"))
    with pytest.raises(ValueError, match="in a folder that exists"):
        export_step_onnx(model_of("xf_gpt2"), tmp_path / "none" / "step.onnx")


@pytest.mark.slow
def test_a_memory_that_is_full_later_is_no_reason_to_go_wrong():
    """A limit far beyond what was traced: either the graph is that of the full memory, or there is none."""
    with pytest.raises(ValueError, match="would not be the same after 65539 tokens as at first"):
        export_step(shallow("xf_compressive_transformer"))


def test_states_that_layers_begin_with_together_are_written(tmp_path):
    """All layers of lolcats begin with one tensor of zeros."""
    config = XFormerConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        attention="lolcats", position="rotary", is_decoder=True, pad_token_id=0,
    )  # fmt: skip
    model = XFormerForCausalLM(config).eval()
    step = export_step(model)
    assert len({x.untyped_storage().data_ptr() for x in step.begin}) < len(step.begin)
    _save_start(model, step, tmp_path / "start.safetensors", None)
    written = load_file(tmp_path / "start.safetensors")
    assert set(written) == {state.name for state in step.states}
    assert all(torch.equal(written[state.name], x) for state, x in zip(step.states, step.begin))
