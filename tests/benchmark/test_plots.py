"""What stands on the pictures: axes that read, chance, sizes."""

import pytest
import torch

from hf_xformers.benchmark.plots import log_ticks, mebibytes, milliseconds, plot_all
from hf_xformers.hub.attention_map import draw

matplotlib = pytest.importorskip("matplotlib")
SPEED = [
    {"label": label, "shape": "encoder", "at": at, "status": "ok", "ms": 3.0 * at / 512, "peak MiB": share * at}
    for label, share in (("dense", 1.5), ("performer", 0.03))
    for at in (512, 2048)
]
QUALITY = [
    {
        "label": "dense",
        "shape": "encoder",
        "at": "copy",
        "status": "ok",
        "chance loss": 3.0,
        "curve": [[0, 0.0, 3.5], [40, 1.5, 1.0]],
    }
]
MAPS = [{"label": "dense", "shape": "encoder", "at": None, "status": "ok", "maps": {"encoder": [[0.5, 0.5], [0, 1]]}}]


def test_a_sweep_shows_the_tasks_whose_models_keep_a_state(tmp_path):
    """Models that read both sides keep none."""
    point = {"hidden_size": 16, "learning_rate": 1e-3, "seed": 0}
    known = {"label": "it", "status": "ok", "point": point, "accuracy": 0.5, "chance accuracy": 0.1}
    rows = [
        {**known, "shape": shape, "at": task, "state size": size}
        for shape, task, size in (("decoder", "copy", 64), ("encoder", "listops", None))
    ]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert plot_all(tmp_path, [], rows, []) == ["state.png"]
        text = (tmp_path / "state.svg").read_text()
        assert ">copy<" in text and "listops" not in text
        assert plot_all(tmp_path, [], rows[1:], []) == []
        nothing = [{**known, "shape": "decoder", "at": "copy", "state size": 0, "label": "forgetful"}]
        assert plot_all(tmp_path, [], rows + nothing, []) == ["state.png"]
        assert ">forgetful<" in (tmp_path / "state.svg").read_text()


@pytest.fixture
def texts(tmp_path):
    """The texts of each picture, from its SVG."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        names = plot_all(tmp_path, SPEED, QUALITY, MAPS, measured="one layer, float32", trained="2 layers, float32")
    assert names == ["time.png", "memory.png", "loss.png", "attention_maps.png"]
    return {name: (tmp_path / name).with_suffix(".svg").read_text() for name in names}


def test_axes_and_titles(texts):
    assert "32 MiB" in texts["memory.png"] and "2 GiB" in texts["memory.png"] and "×10" not in texts["memory.png"]
    assert "5 ms" in texts["time.png"] and "2,048" in texts["time.png"]
    for name in ("time.png", "memory.png"):
        assert "encoder, one layer, float32" in texts[name]
    assert "encoder, 2 layers, float32" in texts["loss.png"] and "float64" in texts["attention_maps.png"]


def test_the_loss_stands_over_steps_and_seconds_beside_chance(texts):
    for words in ("chance (answers' frequencies)", "seconds of training", "steps of training"):
        assert words in texts["loss.png"]


def test_maps_have_axes_and_a_color_bar(texts):
    for words in (">query<", ">key<", "2 x 2", "1.0<"):  # 1.0: the top of the bar
        assert words in texts["attention_maps.png"]
    drawn = draw({"encoder": torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]])})
    for words in ("encoder, 2 x 3", "query (token)", "key (token)", ">0.75<", "float64"):
        assert words in drawn


def test_amounts():
    assert [mebibytes(value) for value in (0.5, 64, 1536)] == ["0.5 MiB", "64 MiB", "1.5 GiB"]
    assert [milliseconds(value) for value in (0.5, 20, 2000)] == ["0.5 ms", "20 ms", "2 s"]


@pytest.mark.parametrize("low, high", [(3, 3), (0.7, 11000), (100, 130), (1e-3, 1e6)])
@pytest.mark.parametrize("steps, base", [((1.0,), 2.0), ((1.0, 2.0, 5.0), 10.0)])
def test_ticks_span_the_values(low, high, steps, base):
    ticks = log_ticks(low, high, steps, base)
    assert ticks == sorted(set(ticks)) and len(ticks) <= 9
    assert ticks[0] <= low * (1 + 1e-9) and ticks[-1] >= high * (1 - 1e-9)
