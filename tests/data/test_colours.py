"""Images as texts of colours: clusters, what is stored, and a model that writes images and knows what they show."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from hf_xformers import XFormerConfig, to_transformers
from hf_xformers.data.colours import colour_clusters, colour_processor, nearest_colours, picture_of, pixels_of
from hf_xformers.finetuning.probe import linear_probe
from hf_xformers.variants.xformer import XFormerForCausalLM

Image = pytest.importorskip("PIL.Image")

SIDE, COLOURS, START = 8, 3, 3
SIZE = (SIDE, SIDE)


def shapes(count, seed):
    """A square or a cross of some colour in noise of another: images, and which of three colours what it shows has."""
    draw = np.random.default_rng(seed)
    images, kinds = [], []
    for _ in range(count):
        order = draw.permutation(3)
        ground, figure = np.array([[220, 40, 40], [40, 200, 60], [50, 60, 220]])[order[:2]]
        pixels = np.broadcast_to(ground, (SIDE, SIDE, 3)).astype(float)
        top, left, kind = *draw.integers(0, 4, 2), int(draw.integers(0, 2))
        if kind:
            pixels[top : top + 5, left + 2] = pixels[top + 2, left : left + 5] = figure
        else:
            pixels[top : top + 4, left : left + 4] = figure
        noise = draw.normal(0, 6, pixels.shape)
        images.append(Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8)))
        kinds.append(order[1])
    return images, torch.tensor(np.array(kinds))


def test_clusters_are_the_means_of_their_pixels():
    centres = torch.tensor([[-0.8, 0.1, 0.5], [0.7, 0.7, -0.9], [0.0, -0.6, 0.0]])
    draw = torch.Generator().manual_seed(0)
    pixels = (centres[:, None] + 0.02 * torch.randn(3, 50, 3, generator=draw)).flatten(0, 1)
    clusters = colour_clusters(pixels, 3)
    order = nearest_colours(centres, clusters)
    assert sorted(order.tolist()) == [0, 1, 2]
    torch.testing.assert_close(clusters[order], pixels.view(3, 50, 3).mean(1), rtol=0, atol=1e-5)
    assert torch.equal(colour_clusters(pixels, 3), clusters)
    with pytest.raises(ValueError, match="have 2 colors, fewer than 3 clusters; take at most 2"):
        colour_clusters(torch.tensor([[0.0, 0, 0], [1, 1, 1], [1, 1, 1]]), 3)


def test_what_is_stored_makes_ids_and_ids_make_pictures(tmp_path):
    images, _ = shapes(6, seed=1)
    clusters = colour_clusters(pixels_of(images, SIZE), COLOURS)
    colour_processor(clusters, SIZE).save_pretrained(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    ids = torch.as_tensor(np.stack(processor(images=images)["input_ids"]))
    assert torch.equal(ids, nearest_colours(pixels_of(images, SIZE).reshape(-1, 3), clusters).view(6, -1))
    large = picture_of(ids[0], processor.clusters, SIZE, zoom=3)
    assert large.size == (3 * SIDE, 3 * SIDE)
    again = processor(images=[picture_of(row, processor.clusters, SIZE) for row in ids])["input_ids"]
    assert np.array_equal(np.stack(again), ids.numpy())  # a cluster's colour is its own nearest one
    with pytest.raises(ValueError, match="an image of 8 x 8 pixels is 64 ids from 0 to 2"):
        picture_of(torch.full((64,), START), processor.clusters, SIZE)


def test_a_model_writes_images_and_knows_what_they_show(tmp_path):
    """Bits per pixel of held-out images beside those of colour frequencies, a completed image, and a linear probe on
    the middle layer beside the most frequent answer."""
    images, kinds = shapes(240, seed=2)
    clusters = colour_clusters(pixels_of(images, SIZE), COLOURS)
    ids = nearest_colours(pixels_of(images, SIZE).reshape(-1, 3), clusters).view(240, -1)
    rows = torch.cat([torch.full((240, 1), START), ids], dim=1)
    train, test = rows[:200], rows[200:]
    torch.manual_seed(0)
    config = XFormerConfig(  # the components of Image GPT
        vocab_size=COLOURS + 1, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=SIDE * SIDE + 1, is_decoder=True, pad_token_id=None, tie_word_embeddings=False,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, position="learned_absolute",
        normalization="rms_norm", residual="pre_ln", feedforward={"type": "gelu", "approximate": "sigmoid"},
        head={"type": "linear", "unpredicted": 1},
    )  # fmt: skip
    model = XFormerForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=120)
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        batch = train[torch.randint(len(train), (16,), generator=generator)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    share = torch.bincount(train[:, 1:].flatten(), minlength=COLOURS).double() / train[:, 1:].numel()
    floor = -share[test[:, 1:]].log2().mean().item()
    with torch.no_grad():
        bits = model(test, labels=test).loss.item() / math.log(2)
    assert bits < floor / 2, (bits, floor)

    half = 1 + SIDE * SIDE // 2
    made = model.generate(test[:4, :half], max_new_tokens=SIDE * SIDE + 1 - half, do_sample=False)
    right = (made[:, half:] == test[:4, half:]).float().mean().item()
    assert made[:, 1:].max() < START and right > 0.6, right
    picture_of(made[0, 1:], clusters, SIZE, zoom=8).save(tmp_path / "completed.png")
    assert Image.open(tmp_path / "completed.png").size == (64, 64)

    with torch.no_grad():
        states = model(rows, output_hidden_states=True).hidden_states[2].mean(1)
    probe = linear_probe(states[:200], kinds[:200], 3)
    accuracy = (probe(states[200:].double()).argmax(-1) == kinds[200:]).float().mean().item()
    most = torch.bincount(kinds[200:]).max().item() / 40
    assert accuracy > most + 0.2, (accuracy, most)

    theirs = to_transformers(model, model_type="imagegpt").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(test).logits, model(test).logits, rtol=1e-4, atol=1e-4)
