"""Features of images, against the model by hand; the probe; what is refused."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image
from transformers import AutoConfig, AutoImageProcessor, AutoModel

from hf_xformers.cli import main
from hf_xformers.data.colors import color_processor
from hf_xformers.data.patch_processors import patch_processor
from hf_xformers.finetuning.feature_reading import FeatureOptions
from hf_xformers.finetuning.features import read_features
from hf_xformers.finetuning.image_features import ImageReader
from hf_xformers.variants import config_class, family
from tests.finetuning.test_images import picture
from tests.training.runs import flags

Picture = pytest.importorskip("PIL.Image")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Two models with their processors, and a folder of lying and standing bars of 10 x 10 pixels."""
    folder = tmp_path_factory.mktemp("image-features")
    for number in range(40):
        kind = ("lying", "standing")[number % 2]
        place = folder / "bars" / kind
        place.mkdir(parents=True, exist_ok=True)
        picture(kind, number).save(place / f"{number:02d}.png")
    torch.manual_seed(0)
    colors = config_class("image_gpt")(**SIZES, vocab_size=9, bos_token_id=8, max_position_embeddings=101)
    family("image_gpt")["ForCausalLM"](colors).save_pretrained(folder / "image_gpt")
    color_processor(torch.linspace(-1, 1, 8)[:, None].expand(8, 3), (10, 10)).save_pretrained(folder / "image_gpt")
    plane = {
        "type": "image_transformer",
        "local": "2d",
        "image_size": (10, 10),
        "num_channels": 1,
        "block_shape": (5, 5),
    }
    sizes = {**SIZES, "vocab_size": 9, "bos_token_id": 8, "max_position_embeddings": 100}
    planes = config_class("image_gpt")(**sizes, attention=plane)
    family("image_gpt")["ForCausalLM"](planes).save_pretrained(folder / "plane")
    color_processor(torch.linspace(-1, 1, 8)[:, None].expand(8, 3), (10, 10)).save_pretrained(folder / "plane")
    patches = config_class("vision_transformer")(**SIZES, image_size=10, patch_size=5, num_channels=1)
    family("vision_transformer")["ForMaskedImageModeling"](patches).save_pretrained(folder / "vision_transformer")
    patch_processor((10, 10), 1).save_pretrained(folder / "vision_transformer")
    return folder


def features(places, model, output, *extra, **options):
    options = {"model": places / model, "output": output, "data": places / "bars", "use_cpu": True, **options}
    return main(["features", *flags(**options), "--no_progress", *extra])


@pytest.mark.parametrize("name", ["image_gpt", "plane", "vision_transformer"])
def test_columns_against_the_model_and_a_probe(name, places, tmp_path):
    out = tmp_path / "out"
    assert features(places, name, out, "--layers", "1", "last", validation_fraction=0.3, probe="label") == 0
    model = AutoModel.from_pretrained(places / name).eval()
    processor = AutoImageProcessor.from_pretrained(places / name)
    expected = []
    for path in sorted((places / "bars").rglob("*.png")):
        kind = path.parent.name
        image = picture(kind, int(path.stem)).convert("L" if name == "vision_transformer" else "RGB")
        made = processor(images=[image])
        if name == "image_gpt":
            given = {"input_ids": torch.tensor([[8, *np.asarray(made["input_ids"][0]).tolist()]])}
        elif name == "plane":  # block by block, as it was trained, without a start
            blocks = np.asarray(made["input_ids"][0]).reshape(2, 5, 2, 5).swapaxes(1, 2)
            given = {"input_ids": torch.tensor(blocks.reshape(1, 100))}
        else:
            given = {"pixel_values": torch.as_tensor(np.stack(made["pixel_values"]))}
        with torch.no_grad():
            states = model(**given, output_hidden_states=True)
        expected.append((states.hidden_states[1][0].mean(0), states.last_hidden_state[0].mean(0)))
    found = [row for split in ("train", "validation") for row in read_features(out, split)]
    assert len(found) == len(expected) == 40
    for column, place in (("layer_1", 0), ("last", 1)):
        ours, theirs = torch.stack([row[column] for row in found]), torch.stack([row[place] for row in expected])
        assert torch.cdist(ours.double(), theirs.double()).min(1).values.max() < 1e-4  # each image once, in some order
        assert torch.cdist(theirs.double(), ours.double()).min(1).values.max() < 1e-4
    figures = json.loads((out / "probe.json").read_text())
    assert figures["classes"] == 2 and figures["train"]["accuracy"]["last"] > figures["train"]["baseline"] + 0.2


@pytest.mark.parametrize("name", ["image_gpt", "vision_transformer"])
def test_sixteen_bits_are_read_as_bytes_are(name, places):
    reader = ImageReader(
        FeatureOptions(model=str(places / name), output="", use_cpu=True), AutoConfig.from_pretrained(places / name)
    )
    plain = np.asarray(picture("lying", 0))
    pictures = [Picture.fromarray(plain), Picture.fromarray(plain.astype(np.uint16) * 257)]
    rows = Dataset.from_dict({"image": pictures}, features=Features({"image": Image()}))
    first, second = next(iter(reader.batch(reader.add(rows, "image", "train")).values()))
    assert torch.equal(first, second) and len(first.unique()) > 2


def test_what_is_refused(places, tmp_path, capsys):
    def said(*extra, model="image_gpt", **options):
        assert features(places, model, tmp_path / "out", *extra, **options) != 0
        return " ".join(capsys.readouterr().err.split())

    assert "--text_column is about text" in said(text_column="text")
    assert "no column of images; name one of" in said(image_column="nowhere")
    assert "the train split has no column 'kind'" in said(probe="kind")
    for path in (places / "image_gpt").glob("preprocessor_config.json"):
        content = path.read_text()
        path.unlink()
        assert "has no image processor" in said()
        path.write_text(content)
