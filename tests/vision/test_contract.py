"""Contract of every family that reads images: what tests/common is for text."""

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

NAMES = [name for name in model_types() if config_class(name).modality == "image"]
each_family = pytest.mark.parametrize("name", NAMES)
each_head = pytest.mark.parametrize(("name", "head"), [(name, head) for name in NAMES for head in family(name)])
CLASSIFIER = "ForImageClassification"
LABELS = torch.tensor([2, 0])


def build(name, head=CLASSIFIER, dtype=torch.float64, strong=True, **changes):
    config = config_class(name)(**tiny_fields(config_class(name), num_labels=3, **changes))
    torch.manual_seed(0)
    model = family(name)[head](config).to(dtype).eval()
    return make_strong(model) if strong else model


def images(model, count=2, seed=0):
    shape = (count, model.config.num_channels, *model.config.image_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(model.dtype)


def hidden(model):
    """Which patches of two images are hidden: every third."""
    count = model.config.grid[0] * model.config.grid[1]
    return (torch.arange(2 * count) % 3 == 0).view(2, count)


def result(output):
    name = next(name for name in ("logits", "reconstruction", "last_hidden_state") if name in output)
    return output[name]


@each_head
def test_weights_come_for_each_call(name, head):
    """Accelerate brings a module's weights for its calls alone."""
    model = build(name, head, torch.float32)
    given = {"pixel_values": images(model)}
    if head == "ForMaskedImageModeling":
        given["bool_masked_pos"] = hidden(model)
    with torch.no_grad():
        expected = result(model(**given))
        close(result(cpu_offload(model, execution_device="cpu")(**given)), expected, 1e-5)


@each_head
def test_loss_and_saving(name, head, tmp_path):
    """Every parameter learns, and the Auto classes give back the same model."""
    model = build(name, head, torch.float32)
    given = {"pixel_values": images(model)}
    asked = {"Model": {}, "ForMaskedImageModeling": {"bool_masked_pos": hidden(model)}}.get(head, {"labels": LABELS})
    output = model(**given, **asked)
    if head != "Model":
        assert output.loss > 0
        output.loss.backward()
        idle = [key for key, parameter in model.named_parameters() if parameter.grad is None]
        assert not idle, f"without gradient: {idle}"
    output = model(**given)
    assert getattr(output, "loss", None) is None
    model.save_pretrained(tmp_path)
    loaded, report = getattr(transformers, HEADS[head]).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) and not any(report.values()), report
    assert torch.equal(result(aligned(loaded)(**given)), result(output))
    assert type(AutoConfig.from_pretrained(tmp_path)) is config_class(name)


@each_family
def test_rows_are_independent(name):
    model = build(name)
    pixels = images(model, 3)
    with torch.no_grad():
        together = model(pixels).logits
        for index in range(3):
            close(model(pixels[index : index + 1]).logits[0], together[index])


@each_family
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


def learn(model, pixels, steps, rate):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(pixel_values=pixels, labels=LABELS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@each_family
def test_training(name):
    model = build(name, dtype=torch.float32, strong=False, **NO_DROPOUT).train()
    losses = learn(model, images(model), 10, 1e-2)
    assert losses[-1] < losses[0] - 0.25, losses


@each_family
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing(name):
    """Both kinds run every layer twice and give the gradients of the plain pass."""
    model = build(name).train()
    pixels, calls = images(model), []
    for key, module in model.named_modules():
        if isinstance(module, XFormerLayer):
            for child, part in module.named_children():
                part.register_forward_hook(lambda *_, name=f"{key}.{child}": calls.append(name))

    def run():
        model.zero_grad()
        torch.manual_seed(0)
        model(pixel_values=pixels, labels=LABELS).loss.backward()
        return {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    expected, plain = run(), list(calls)
    for use_reentrant in (True, False):
        calls.clear()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        close_gradients(run(), expected)
        assert sorted(calls) == sorted(plain * 2)
        model.gradient_checkpointing_disable()


@each_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    """Pixels in float32, as processors give them, and weights in half: near the exact result."""
    model = build(name)
    pixels = images(model)
    with torch.no_grad():
        expected = model(pixels).logits
        output = model.to(dtype)(pixels.float()).logits
    assert output.dtype == dtype
    close(output.double(), expected, 0.06)


@each_family
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_lora(name, tmp_path):
    model = build(name, dtype=torch.float32, **NO_DROPOUT)
    pixels = images(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    losses = learn(adapted.train(), pixels, 6, 2e-2)
    assert losses[-1] < losses[0]
    for key, value in adapted.get_base_model().state_dict().items():
        if "lora_" not in key:
            assert torch.equal(value, before[key.replace("base_layer.", "")]), key
    adapted.eval().save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build(name, dtype=torch.float32, **NO_DROPOUT), tmp_path).eval()
    with torch.no_grad():
        close(again(pixel_values=pixels).logits, adapted(pixel_values=pixels).logits, 1e-6)


@each_family
def test_recorded(name):
    """All layers' states and attention weights, whose rows sum to 1."""
    model = build(name)
    with torch.no_grad():
        output = model(images(model), output_hidden_states=True, output_attentions=True)
        base = model.model(images(model)).last_hidden_state
        close(output.logits, model(images(model)).logits)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert all(state.shape == base.shape for state in output.hidden_states)
    assert len(output.attentions) == model.config.num_hidden_layers
    for weights in output.attentions:
        close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@each_family
def test_compile(name):
    model = build(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        close(compiled(images(model)).logits, model(images(model)).logits)
    torch._dynamo.reset()


def test_there_are_some():
    assert "xf_vision_transformer" in NAMES
