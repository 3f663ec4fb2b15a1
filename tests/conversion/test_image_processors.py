"""Conversion of models that read images: their image processors, and the head that reconstructs patches."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, ViTForMaskedImageModeling, ViTModel

from hf_xformers import XFVisionTransformerConfig, XFVisionTransformerForMaskedImageModeling
from hf_xformers.conversion import convert_checkpoint, from_transformers, swap_checkpoint, to_transformers
from hf_xformers.data.colors import color_processor
from hf_xformers.data.patch_processors import patch_processor
from tests.conversion.architectures import architectures

Image = pytest.importorskip("PIL.Image")

FILE = "preprocessor_config.json"


@pytest.fixture
def pictures():
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (4, 6, 3), dtype=np.uint8)) for _ in range(3)]


def saved(folder, name, head, processor, **changes):
    """A tiny model of transformers with its image processor."""
    architectures()[name].make(head, **changes).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def made(folder, images):
    found = AutoImageProcessor.from_pretrained(folder)(images=images)
    return np.stack([np.asarray(row) for row in next(iter(found.values()))])


def test_colors_travel_with_image_gpt(tmp_path, pictures):
    clusters = torch.rand(59, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    head = "ImageGPTForCausalImageModeling"
    theirs = saved(tmp_path / "theirs", "imagegpt", head, color_processor(clusters, (4, 6)))
    report = convert_checkpoint(theirs, tmp_path / "ours")
    assert not report.notes
    assert not convert_checkpoint(tmp_path / "ours", tmp_path / "back").notes
    ids = made(theirs, pictures)
    assert ids.shape == (3, 24) and len(np.unique(ids)) > 10
    for folder in (tmp_path / "ours", tmp_path / "back"):
        assert np.array_equal(made(folder, pictures), ids)
        assert json.loads((folder / FILE).read_text()) == json.loads((theirs / FILE).read_text())


def test_scale_and_size_travel_with_vit(tmp_path, pictures):
    theirs = saved(tmp_path / "theirs", "vit", "ViTForImageClassification", patch_processor((12, 12), 3))
    assert not convert_checkpoint(theirs, tmp_path / "ours").notes
    assert not convert_checkpoint(tmp_path / "ours", tmp_path / "back").notes
    for folder in (tmp_path / "ours", tmp_path / "back"):
        assert np.array_equal(made(folder, pictures), made(theirs, pictures))


def test_colors_stay_with_other_components(tmp_path, pictures):
    clusters = torch.rand(59, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    head = "ImageGPTForCausalImageModeling"
    theirs = saved(tmp_path / "theirs", "imagegpt", head, color_processor(clusters, (4, 6)))
    report = swap_checkpoint(theirs, tmp_path / "ours", attention="linear_transformer")
    assert not any("no image processor" in note or "no tokenizer" in note for note in report.notes)
    assert np.array_equal(made(tmp_path / "ours", pictures), made(theirs, pictures))


def test_grey_pictures_are_made_here_and_asked_for_there(tmp_path, pictures):
    """transformers alone reads what is converted to it."""
    ours = tmp_path / "ours"
    config = XFVisionTransformerConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=12, patch_size=4, num_channels=1
    )
    XFVisionTransformerForMaskedImageModeling(config).save_pretrained(ours)
    patch_processor((12, 12), 1).save_pretrained(ours)
    report = convert_checkpoint(ours, tmp_path / "theirs")
    assert report.complete
    assert report.notes == ["transformers' image processor does not make pictures gray: give it gray ones"]
    assert json.loads((tmp_path / "theirs" / FILE).read_text())["image_processor_type"] == "ViTImageProcessor"
    assert not convert_checkpoint(tmp_path / "theirs", tmp_path / "again").notes
    grey = [picture.convert("L") for picture in pictures]
    assert np.array_equal(made(tmp_path / "theirs", grey), made(ours, pictures))
    assert np.array_equal(made(tmp_path / "again", pictures), made(ours, pictures))


def test_what_is_lost_is_said(tmp_path):
    theirs = saved(tmp_path / "theirs", "vit", "ViTModel", patch_processor((12, 12), 3))
    (theirs / FILE).write_text("{broken")
    with pytest.raises(
        ValueError, match=f"The image processor of .* cannot be read .*download {FILE} again, or remove"
    ):
        convert_checkpoint(theirs, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    (theirs / FILE).unlink()
    assert convert_checkpoint(theirs, tmp_path / "ours").notes == ["the source has no image processor"]


def test_reconstructions_of_hidden_patches_agree_in_double_precision():
    theirs = architectures()["vit"].make("ViTForMaskedImageModeling").double()
    ours = from_transformers(theirs)
    assert type(ours) is XFVisionTransformerForMaskedImageModeling
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 3, 12, 12, generator=generator, dtype=torch.float64)
    hidden = torch.rand(3, 9, generator=generator) < 0.5
    for side in (to_transformers(ours), theirs):
        with torch.no_grad():
            wanted = side(images, bool_masked_pos=hidden).reconstruction
            torch.testing.assert_close(ours(images, bool_masked_pos=hidden).reconstruction, wanted, atol=1e-12, rtol=0)
    other = ours(images, bool_masked_pos=~hidden).reconstruction
    assert (other - wanted).abs().max() > 1e-2  # the token that stands for hidden patches matters


def test_squares_that_are_no_patches_are_refused(tmp_path):
    theirs = architectures()["vit"].make("ViTForMaskedImageModeling", encoder_stride=2)
    assert isinstance(theirs, ViTForMaskedImageModeling)
    with pytest.raises(ValueError, match="'decoder.0.weight' .* makes 12 pixels of each patch, which has 48.*'Model'"):
        from_transformers(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", head="Model")  # the remedy works
    assert "decoder.0.weight" in report.dropped
    oblong = XFVisionTransformerConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=12, patch_size=[2, 6]
    )
    ours = XFVisionTransformerForMaskedImageModeling(oblong)
    with pytest.raises(ValueError, match="patches of 2 x 6 pixels are no squares.*head='Model'"):
        to_transformers(ours)
    assert isinstance(to_transformers(ours, head="Model"), ViTModel)
