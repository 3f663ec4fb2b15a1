"""Pictures of every depth, files that are cut short or turned, and the processor of models with one channel."""

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from datasets import Dataset, Features
from datasets import Image as ImageFeature
from transformers import AutoImageProcessor

from hf_xformers.data.colors import color_processor, pixels_of
from hf_xformers.data.images import sizes_of
from hf_xformers.data.patch_processors import patch_processor
from hf_xformers.data.picture_modes import as_mode
from hf_xformers.finetuning.tasks.color_images import ReadColors
from hf_xformers.finetuning.tasks.images import ReadImages
from hf_xformers.training.image_pretraining import ReadPixels

Image = pytest.importorskip("PIL.Image")

LEVELS = np.arange(64).reshape(8, 8)
BYTES, WORDS = (LEVELS * 4).astype(np.uint8), (LEVELS * 4 * 257).astype(np.uint16)  # of the same greys


def stored(picture, suffix="png", **options):
    file = io.BytesIO()
    picture.save(file, format=suffix, **options)
    return file.getvalue()


def rows(*files):
    """A dataset of images by their files' contents."""
    return Dataset.from_dict(
        {"image": [{"bytes": content, "path": f"{place}.x"} for place, content in enumerate(files)]},
        features=Features({"image": ImageFeature()}),
    )


def deep():
    """The same greys as `BYTES`, in 16 bits: by what a file has, and by what Pillow holds."""
    header = b"P5 8 8 65535\n"
    return {
        "png": rows(stored(Image.fromarray(WORDS)))[0]["image"],
        "tiff": rows(stored(Image.fromarray(WORDS), "tiff"))[0]["image"],
        "pgm": rows(header + WORDS.astype(">u2").tobytes())[0]["image"],
        "big endian": Image.frombytes("I;16B", (8, 8), WORDS.astype(">u2").tobytes()),
        "32 bits": Image.fromarray(WORDS.astype(np.int32)),
    }


@pytest.mark.parametrize("kind", ["png", "tiff", "pgm", "big endian", "32 bits"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_sixteen_bits_are_scaled_and_not_clipped(kind, mode):
    found = as_mode(deep()[kind], mode)
    assert found.mode == mode and np.array_equal(found.convert("L"), BYTES)


def test_levels_in_between_are_rounded():
    picture = Image.fromarray(np.array([[0, 128, 129, 65406, 65407, 65535]], dtype=np.uint16))
    assert np.asarray(as_mode(picture, "L")).tolist() == [[0, 0, 1, 254, 255, 255]]


def test_every_reader_reads_sixteen_bits_as_it_reads_bytes():
    clusters = torch.linspace(-1, 1, 16)[:, None].expand(16, 3)
    grey, colored = patch_processor((8, 8), 1), patch_processor((8, 8), 3)
    readers = (
        ReadPixels(grey, 1),
        ReadPixels(colored, 3),
        ReadImages(grey, 1),
        ReadImages(colored, 3),
        ReadColors(color_processor(clusters, (8, 8))),
    )
    plain, picture = Image.fromarray(BYTES), deep()["png"]
    for reader in readers:
        for wanted, found in zip(*(reader({"image": [image]}).popitem()[1] for image in (plain, picture))):
            assert np.array_equal(wanted, found), reader
    assert torch.equal(pixels_of([picture], (8, 8)), pixels_of([plain], (8, 8)))


@pytest.mark.parametrize(
    "picture, message",
    [
        (Image.fromarray(np.ones((8, 8), dtype=np.float32)), "mode 'F' has fractions"),
        (Image.fromarray(np.full((8, 8), 70000, dtype=np.int32)), "these use 70000 to 70000"),
        (Image.fromarray(np.full((8, 8), -1, dtype=np.int32)), "these use -1 to -1"),
        (Image.fromarray(BYTES.astype(np.int32)), "these use 0 to 252"),
    ],
)
def test_numbers_without_a_white_are_refused_and_named(picture, message):
    with pytest.raises(ValueError, match=rf"{message}.*; save it with 8 or 16 bits a channel"):
        as_mode(picture, "RGB")
    first, second = stored(Image.fromarray(BYTES)), stored(picture, "tiff")
    with pytest.raises(
        ValueError, match=rf"image 1 \(1.x\) cannot be read \(.*{message}.*\); replace it or remove it"
    ):
        sizes_of(rows(first, second))


@pytest.mark.parametrize("suffix", ["png", "jpeg"])
def test_a_file_that_ends_too_early_is_named(suffix):
    whole = stored(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), suffix)
    assert sizes_of(rows(whole, whole)) == [(64, 64)] * 2
    with pytest.raises(ValueError, match=r"image 1 \(1.x\) cannot be read .*; replace it or remove it"):
        sizes_of(rows(whole, whole[: len(whole) // 2]))


@pytest.mark.parametrize("suffix", ["png", "jpeg"])
def test_sizes_are_those_of_what_is_decoded(suffix):
    """Cameras store a picture as it fell on the sensor, and beside it how it was held."""
    files = []
    for orientation in range(1, 9):
        picture = Image.new("RGB", (12, 8))
        picture.getexif()[0x0112] = orientation
        files.append(stored(picture, suffix, exif=picture.getexif()))
    made = rows(*files)
    found = sizes_of(made)
    assert found == [(8, 12)] * 4 + [(12, 8)] * 4
    assert found == [(image.height, image.width) for image in made["image"]]


def test_a_model_of_one_channel_reads_colored_pictures(tmp_path):
    """Pipelines give pictures in three colors; the processor is found in a process that has imported the package
    alone."""
    patch_processor((8, 8), 1).save_pretrained(tmp_path)
    loaded = AutoImageProcessor.from_pretrained(tmp_path)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    made = loaded(images=[picture, picture.convert("L")], return_tensors="pt")["pixel_values"]
    assert made.shape == (2, 1, 8, 8) and torch.equal(made[0], made[1])
    torch.testing.assert_close(made[0, 0], torch.from_numpy(np.array(picture.convert("L"))) / 127.5 - 1.0)
    assert type(patch_processor((8, 8), 3)).__name__.startswith("ViTImageProcessor")
    code = (
        "import sys, hf_xformers, transformers; assert 'torch' not in sys.modules;"
        " print(type(transformers.AutoImageProcessor.from_pretrained(sys.argv[1])).__name__)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["GreyImageProcessor"]
