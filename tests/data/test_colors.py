"""Images as texts of colors: clusters, and what is stored."""

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from hf_xformers.data.colors import color_clusters, color_processor, nearest_colors, picture_of, pixels_of

Image = pytest.importorskip("PIL.Image")

SIDE, COLORS, START = 8, 3, 3
SIZE = (SIDE, SIDE)


def shapes(count, seed):
    """Squares and crosses of some color in noise of another."""
    draw = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        ground, figure = np.array([[220, 40, 40], [40, 200, 60], [50, 60, 220]])[draw.permutation(3)[:2]]
        pixels = np.broadcast_to(ground, (SIDE, SIDE, 3)).astype(float)
        top, left, kind = *draw.integers(0, 4, 2), int(draw.integers(0, 2))
        if kind:
            pixels[top : top + 5, left + 2] = pixels[top + 2, left : left + 5] = figure
        else:
            pixels[top : top + 4, left : left + 4] = figure
        noise = draw.normal(0, 6, pixels.shape)
        images.append(Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8)))
    return images


def test_clusters_are_the_means_of_their_pixels():
    centres = torch.tensor([[-0.8, 0.1, 0.5], [0.7, 0.7, -0.9], [0.0, -0.6, 0.0]])
    draw = torch.Generator().manual_seed(0)
    pixels = (centres[:, None] + 0.02 * torch.randn(3, 50, 3, generator=draw)).flatten(0, 1)
    clusters = color_clusters(pixels, 3)
    order = nearest_colors(centres, clusters)
    assert sorted(order.tolist()) == [0, 1, 2]
    torch.testing.assert_close(clusters[order], pixels.view(3, 50, 3).mean(1), rtol=0, atol=1e-5)
    assert torch.equal(color_clusters(pixels, 3), clusters)
    with pytest.raises(ValueError, match="have 2 colors, fewer than 3 clusters; take at most 2"):
        color_clusters(torch.tensor([[0.0, 0, 0], [1, 1, 1], [1, 1, 1]]), 3)


def test_what_is_stored_makes_ids_and_ids_make_pictures(tmp_path):
    images = shapes(6, seed=1)
    clusters = color_clusters(pixels_of(images, SIZE), COLORS)
    color_processor(clusters, SIZE).save_pretrained(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    ids = torch.as_tensor(np.stack(processor(images=images)["input_ids"]))
    assert torch.equal(ids, nearest_colors(pixels_of(images, SIZE).reshape(-1, 3), clusters).view(6, -1))
    large = picture_of(ids[0], processor.clusters, SIZE, zoom=3)
    assert large.size == (3 * SIDE, 3 * SIDE)
    again = processor(images=[picture_of(row, processor.clusters, SIZE) for row in ids])["input_ids"]
    assert np.array_equal(np.stack(again), ids.numpy())  # a cluster's color is its own nearest one
    with pytest.raises(ValueError, match="an image of 8 x 8 pixels is 64 ids from 0 to 2"):
        picture_of(torch.full((64,), START), processor.clusters, SIZE)
