"""Contract of every family that reads images or sound: what tests/common is for text."""

import numpy as np
import pytest
import torch
import transformers
from accelerate import cpu_offload
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from transformers import AutoConfig, ViTImageProcessorPil, pipeline

from hf_xformers.blocks.base import XFormerLayer
from hf_xformers.families import HEADS
from hf_xformers.variants import config_class, family, model_types
from tests.helpers import NO_DROPOUT, aligned, close, close_gradients, make_strong, tiny_fields

NAMES = {kind: [name for name in model_types() if config_class(name).modality == kind] for kind in ("image", "sound")}
EVERY = NAMES["image"] + NAMES["sound"]
each_family = pytest.mark.parametrize("name", EVERY)
each_image = pytest.mark.parametrize("name", NAMES["image"])
each_sound = pytest.mark.parametrize("name", NAMES["sound"])
each_head = pytest.mark.parametrize(("name", "head"), [(name, head) for name in EVERY for head in family(name)])
LABELS = {"image": torch.tensor([2, 0]), "sound": torch.tensor([[7, 7, 9], [5, -100, -100]])}
FRAMES = 37


def build(name, head=None, dtype=torch.float64, strong=True, **changes):
    sound = name in NAMES["sound"]
    head = head or ("ForCTC" if sound else "ForImageClassification")
    changes = {**({"num_mel_bins": 10} if sound else {"num_labels": 3}), **changes}
    torch.manual_seed(0)
    model = family(name)[head](config_class(name)(**tiny_fields(config_class(name), **changes))).to(dtype).eval()
    return make_strong(model) if strong else model


def images(model, count=2, seed=0):
    shape = (count, model.config.num_channels, *model.config.image_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(model.dtype)


def sounds(model, count=2, frames=FRAMES, seed=0):
    shape = (count, frames, model.config.num_mel_bins)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(model.dtype)


def inputs(model, labels=False, padded=False):
    """Keyword arguments of a forward pass of two rows; the second sound may end early."""
    kind = model.config.modality
    given = {"pixel_values": images(model)} if kind == "image" else {"input_features": sounds(model)}
    if kind == "sound" and padded:
        given["attention_mask"] = torch.ones(2, FRAMES, dtype=torch.long)
        given["attention_mask"][1, 9:] = 0
    return {**given, "labels": LABELS[kind]} if labels else given


def hidden(model):
    """Which patches of two images are hidden: every third."""
    count = model.config.grid[0] * model.config.grid[1]
    return (torch.arange(2 * count) % 3 == 0).view(2, count)


def result(output):
    return output[next(name for name in ("logits", "reconstruction", "last_hidden_state") if name in output)]


@each_head
def test_loss_and_saving(name, head, tmp_path):
    """Every parameter learns, the Auto classes give back the same model, and accelerate may bring a module's weights
    for its calls alone."""
    model = build(name, head, torch.float32)
    kind, given, asked = model.config.modality, inputs(model), {}
    if head == "ForMaskedImageModeling":
        asked = {"bool_masked_pos": hidden(model)}
    elif head != "Model":
        asked = {"labels": LABELS[kind]}
    if head != "Model":
        loss = model.train(kind == "sound")(**given, **asked).loss
        assert loss > 0
        loss.backward()
        idle = [key for key, parameter in model.named_parameters() if parameter.grad is None]
        assert not idle, f"without gradient: {idle}"
    output = model.eval()(**given)
    assert getattr(output, "loss", None) is None
    model.save_pretrained(tmp_path)
    loaded, report = getattr(transformers, HEADS[head]).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) and not any(report.values()), report
    assert torch.equal(result(aligned(loaded)(**given)), result(output))
    assert type(AutoConfig.from_pretrained(tmp_path)) is config_class(name)
    with torch.no_grad():
        expected = result(model(**given, **asked))
        close(result(cpu_offload(model, execution_device="cpu")(**given, **asked)), expected, 1e-5)


@each_image
def test_rows_are_independent(name):
    model = build(name)
    pixels = images(model, 3)
    with torch.no_grad():
        together = model(pixels).logits
        for index in range(3):
            close(model(pixels[index : index + 1]).logits[0], together[index])


@each_image
def test_pipeline(name, tmp_path):
    """From files: the processor resizes and normalises, the pipeline names the classes."""
    model = build(name, dtype=torch.float32)
    height, width = model.config.image_shape
    model.save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": height, "width": width}).save_pretrained(tmp_path)
    classify = pipeline("image-classification", model=str(tmp_path), device="cpu")

    picture = Image.fromarray((np.arange(40 * 30 * 3) % 251).reshape(40, 30, 3).astype("uint8"))
    found = classify(picture, top_k=3)
    pixels = classify.image_processor(picture, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, model.config.num_channels, height, width)
    with torch.no_grad():
        expected = model(pixels).logits[0].softmax(-1)
    assert {entry["label"] for entry in found} == set(model.config.id2label.values())
    for entry in found:
        assert entry["score"] == pytest.approx(expected[model.config.label2id[entry["label"]]].item(), abs=1e-5)


@each_sound
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


@each_sound
def test_a_row_of_padding_alone_has_finite_gradients(name):
    model = build(name).train()
    mask = torch.ones(2, FRAMES, dtype=torch.long)
    mask[1] = 0
    model(sounds(model), mask, labels=LABELS["sound"]).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@each_sound
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
        model(torch.cat(pieces, dim=1), mask, labels=LABELS["sound"]).loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        found.append({**gradients, **dict(model.named_buffers())})
    for other in found[1:]:
        close_gradients(other, found[0])


@each_family
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing(name):
    """Both kinds run every layer twice, give the gradients of the plain pass, and move statistics once."""

    def run(kind):
        model, calls = build(name).train(), []
        for key, module in model.named_modules():
            if isinstance(module, XFormerLayer):
                for child, part in module.named_children():
                    part.register_forward_hook(lambda *_, name=f"{key}.{child}": calls.append(name))
        if kind is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind})
        torch.manual_seed(0)
        model(**inputs(model, labels=True)).loss.backward()
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
    """Inputs in float32, as processors give them, weights in half: near the exact result; of sound the loss too."""
    model = build(name)
    sound = model.config.modality == "sound"
    given = inputs(model, labels=sound, padded=True)
    with torch.no_grad():
        expected = model(**given)
        floats = {key: value.float() if value.is_floating_point() else value for key, value in given.items()}
        output = model.to(dtype)(**floats)
    assert output.logits.dtype == dtype
    close(output.logits.double(), expected.logits, 0.06)
    if sound:
        assert output.loss.dtype == torch.float32
        close(output.loss.double(), expected.loss, 0.03)


@each_family
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_lora(name, tmp_path):
    """Adapters that learn beside frozen weights and frozen statistics, and come back."""
    model = build(name, dtype=torch.float32, **NO_DROPOUT)
    given = inputs(model, labels=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parts = ["q_proj", "v_proj"] + ["up_proj"] * (model.config.modality == "sound")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=parts)).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(6):
        loss = adapted(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for key, value in adapted.get_base_model().state_dict().items():
        if "lora_" not in key:
            assert torch.equal(value, before[key.replace("base_layer.", "")]), key
    adapted.eval().save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build(name, dtype=torch.float32, **NO_DROPOUT), tmp_path).eval()
    with torch.no_grad():
        close(again(**given).logits, adapted(**given).logits, 1e-6)


@each_family
def test_what_is_recorded_and_both_paths(name):
    """All layers' states and attention weights, whose rows sum to 1; the literal path and the fast one agree."""
    model = build(name)
    given = inputs(model, padded=True)
    with torch.no_grad():
        fast, base = model(**given).logits, model.model(**given).last_hidden_state
        literal = model(**given, output_attentions=True, output_hidden_states=True)
        model.set_attn_implementation("eager")
        close(model(**given).logits, fast)
    close(literal.logits, fast)
    assert len(literal.hidden_states) == model.config.num_hidden_layers + 1
    assert all(state.shape == base.shape for state in literal.hidden_states)
    assert len(literal.attentions) == model.config.num_hidden_layers
    for weights in literal.attentions:
        close(weights[0].sum(-1), torch.ones_like(weights[0, ..., 0]))


@each_family
def test_compile(name):
    model = build(name)
    given = inputs(model, padded=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        close(compiled(**given).logits, model(**given).logits)  # torch's CTC loss is no graph
    torch._dynamo.reset()


@each_sound
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
