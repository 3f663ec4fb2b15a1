"""Contract of every family that reads sound: what tests/common is for text."""

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig

from hf_xformers.blocks.base import XFormerLayer
from hf_xformers.families import HEADS
from hf_xformers.variants import config_class, family, model_types
from tests.helpers import NO_DROPOUT, aligned, close, close_gradients, make_strong, tiny_fields

NAMES = [name for name in model_types() if config_class(name).modality == "sound"]
each_family = pytest.mark.parametrize("name", NAMES)
each_head = pytest.mark.parametrize(("name", "head"), [(name, head) for name in NAMES for head in family(name)])
LABELS = torch.tensor([[7, 7, 9], [5, -100, -100]])
FRAMES = 37


def build(name, head="ForCTC", dtype=torch.float64, strong=True, **changes):
    config = config_class(name)(**tiny_fields(config_class(name), **{"num_mel_bins": 10, **changes}))
    torch.manual_seed(0)
    model = family(name)[head](config).to(dtype).eval()
    return make_strong(model) if strong else model


def sounds(model, count=2, frames=FRAMES, seed=0):
    shape = (count, frames, model.config.num_mel_bins)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(model.dtype)


def result(output):
    return output.logits if "logits" in output else output.last_hidden_state


@each_head
def test_loss_and_saving(name, head, tmp_path):
    """Every parameter learns, and the Auto classes give back the same model."""
    model = build(name, head, torch.float32)
    given = {"input_features": sounds(model)}
    output = model.train(head != "Model")(**given, **({"labels": LABELS} if head != "Model" else {}))
    if head != "Model":
        assert output.loss > 0
        output.loss.backward()
        idle = [key for key, parameter in model.named_parameters() if parameter.grad is None]
        assert not idle, f"without gradient: {idle}"
    output = model.eval()(**given)
    assert getattr(output, "loss", None) is None
    model.save_pretrained(tmp_path)
    loaded, report = getattr(transformers, HEADS[head]).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) and not any(report.values()), report
    assert torch.equal(result(aligned(loaded)(**given)), result(output))
    assert type(AutoConfig.from_pretrained(tmp_path)) is config_class(name)


@each_family
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("frames", [1, 2, 5, 8, 23, 37])
def test_padding_changes_nothing(name, side, frames):
    """However much there is, on either side, whatever stands there; also in the loss."""
    model = build(name)
    alone = sounds(model, 1, frames, seed=frames)
    batch, mask = sounds(model, 3, FRAMES + 6, seed=99), torch.zeros(3, FRAMES + 6, dtype=torch.long)
    place = slice(0, frames) if side == "right" else slice(FRAMES + 6 - frames, FRAMES + 6)
    batch[0, place], mask[0, place], mask[1] = alone[0], 1, 1
    states = -(-frames // 4)
    with torch.no_grad():
        apart, padded = model(alone), model(batch, mask)  # the third row is padding alone
    close(padded.logits[0, :states], apart.logits[0])
    assert padded.frame_mask.sum(-1).tolist() == [states, -(-(FRAMES + 6) // 4), 0]
    blank = model.config.pad_token_id
    assert (padded.logits[0, states:].softmax(-1)[:, blank] == 1).all()
    assert padded.logits.isfinite().all()
    labels = torch.full((3, 2), -100)
    labels[0, 0] = labels[2, 0] = 5
    losses = model(batch, mask, labels=labels).loss - model(batch, mask, labels=labels[[1, 1, 1]]).loss
    alike = model(alone, labels=labels[:1, :1]).loss - model(alone, labels=labels[1:2]).loss
    close(losses * 3, alike)


@each_family
def test_a_row_of_padding_alone_has_finite_gradients(name):
    model = build(name).train()
    mask = torch.ones(2, FRAMES, dtype=torch.long)
    mask[1] = 0
    model(sounds(model), mask, labels=LABELS).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@each_family
def test_training_does_not_depend_on_padding(name):
    """Nor do the statistics that it leaves behind."""
    found = []
    for extra, side in ((0, "right"), (9, "right"), (9, "left")):
        model = build(name, **NO_DROPOUT).train()
        rows = sounds(model, 2, 20)
        fill = sounds(model, 2, extra, seed=4)
        pieces = [rows, fill] if side == "right" else [fill, rows]
        real = [torch.ones(2, 20), torch.zeros(2, extra)]
        mask = torch.cat(real if side == "right" else real[::-1], dim=1)
        model(torch.cat(pieces, dim=1), mask, labels=LABELS).loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        found.append({**gradients, **dict(model.named_buffers())})
    for other in found[1:]:
        close_gradients(other, found[0])


@each_family
def test_both_paths_agree(name):
    """The literal one, with its weights, and the one that is meant to be fast."""
    model = build(name)
    mask = torch.ones(2, FRAMES, dtype=torch.long)
    mask[1, 20:] = 0
    with torch.no_grad():
        fast = model(sounds(model), mask).logits
        literal = model(sounds(model), mask, output_attentions=True, output_hidden_states=True)
        model.set_attn_implementation("eager")
        close(model(sounds(model), mask).logits, fast)
    close(literal.logits, fast)
    assert len(literal.hidden_states) == model.config.num_hidden_layers + 1
    assert len(literal.attentions) == model.config.num_hidden_layers
    for weights in literal.attentions:
        close(weights[0].sum(-1), torch.ones_like(weights[0, ..., 0]))


def learn(model, features, steps, rate):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(input_features=features, labels=LABELS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@each_family
def test_training(name):
    model = build(name, dtype=torch.float32, strong=False, **NO_DROPOUT).train()
    losses = learn(model, sounds(model), 12, 1e-2)
    assert losses[-1] < losses[0] / 2, losses


@each_family
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing(name):
    """Both kinds run every layer twice, give the gradients of the plain pass, and move statistics once."""

    def run(kind):
        model = build(name, **NO_DROPOUT).train()
        calls = []
        for key, module in model.named_modules():
            if isinstance(module, XFormerLayer):
                for child, part in module.named_children():
                    part.register_forward_hook(lambda *_, name=f"{key}.{child}": calls.append(name))
        if kind is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind})
        model(sounds(model), labels=LABELS).loss.backward()
        found = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        return {**found, **dict(model.named_buffers())}, sorted(calls)

    expected, calls = run(None)
    for use_reentrant in (True, False):
        found, twice = run(use_reentrant)
        close_gradients(found, expected)
        assert twice == sorted(calls * 2)


@each_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    """Features in float32, as extractors give them, and weights in half: near the exact result; the loss too."""
    model = build(name)
    mask = torch.ones(2, FRAMES, dtype=torch.long)
    mask[1, 9:] = 0
    with torch.no_grad():
        expected = model(sounds(model), mask, labels=LABELS)
        output = model.to(dtype)(sounds(model).float(), mask, labels=LABELS)
    assert output.logits.dtype == dtype and output.loss.dtype == torch.float32
    close(output.logits.double(), expected.logits, 0.06)
    close(output.loss.double(), expected.loss, 0.03)


@each_family
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_lora(name, tmp_path):
    """Adapters beside frozen weights and frozen statistics."""
    model = build(name, dtype=torch.float32, **NO_DROPOUT)
    features = sounds(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"]))
    losses = learn(adapted.train(), features, 6, 2e-2)
    assert losses[-1] < losses[0]
    for key, value in adapted.get_base_model().state_dict().items():
        if "lora_" not in key:
            assert torch.equal(value, before[key.replace("base_layer.", "")]), key
    adapted.eval().save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build(name, dtype=torch.float32, **NO_DROPOUT), tmp_path).eval()
    with torch.no_grad():
        close(again(input_features=features).logits, adapted(input_features=features).logits, 1e-6)


@each_family
def test_compile(name):
    model = build(name)
    mask = torch.ones(2, FRAMES, dtype=torch.long)
    mask[1, 9:] = 0
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        close(compiled(sounds(model), mask).logits, model(sounds(model), mask).logits)  # torch's CTC loss is no graph
    torch._dynamo.reset()


@each_family
def test_what_is_refused(name):
    model = build(name)
    with pytest.raises(ValueError, match=r"must be \[batch, frames, 10 features\], got \[2, 37, 9\]"):
        model(sounds(model)[..., :9])
    with pytest.raises(ValueError, match=r"Give `input_features`"):
        model()
    with pytest.raises(ValueError, match=r"`attention_mask` must be \[batch, frames\] = \[2, 37\], got \[2, 10\]"):
        model(sounds(model), torch.ones(2, 10))
    with pytest.raises(ValueError, match="`labels` has the id 99, and the vocabulary has those from 0 to 98"):
        model(sounds(model), labels=torch.tensor([[99], [5]]))
    with pytest.raises(ValueError, match="must be .batch = 2, labels., got .3, 1."):
        model(sounds(model), labels=torch.ones(3, 1).long())
    with pytest.raises(ValueError, match="CTC needs a blank, which is `pad_token_id`"):
        build(name, pad_token_id=None)


def test_there_are_some():
    assert "xf_conformer" in NAMES
