"""Tunes in ABC: what is written can be read, bars are full, pitches are those of the key, and sounds are as long."""

import wave

import numpy as np
import pytest
import torch

from examples import music
from examples.sounds import chord_of, sines, spell_in_tones, write_wav
from examples.tunes import KEYS, make_tune, notes_of, sound_of, tunes, write_tunes
from hf_xformers import XFMusicTransformerConfig, XFMusicTransformerForCausalLM


def test_notes_are_read_as_the_standard_says():
    assert notes_of("K:C C D2 c z4 b' B,3") == [(60, 1), (62, 2), (72, 1), (None, 4), (95, 1), (59, 3)]
    assert notes_of("K:G F c f") == [(66, 1), (72, 1), (78, 1)]  # F sharp
    assert notes_of("K:Bb B e2") == [(70, 1), (75, 2)]  # B flat, E flat
    assert notes_of("what? ]]") != [] and notes_of("| |] 7") == []


def test_tunes_have_eight_full_bars_in_their_key():
    for seed in range(60):
        tune = make_tune(seed)
        key = tune.split()[0].removeprefix("K:")
        tonic, _ = KEYS[key]
        scale = {(tonic + step) % 12 for step in (0, 2, 4, 5, 7, 9, 11)}
        bars = tune.split(" ", 1)[1].removesuffix(" |]").split(" | ")
        assert len(bars) == 8
        for bar in bars:
            assert sum(length for _, length in notes_of(f"K:{key} {bar}")) == 8, tune
        assert {pitch % 12 for pitch, _ in notes_of(tune)} <= scale, tune
        assert notes_of(tune)[-1][0] % 12 == tonic
        first, moved = ([length for _, length in notes_of(bar)] for bar in bars[:2])
        assert first == moved and bars[0] == bars[4] and bars[1] == bars[5]


def test_tunes_differ_and_follow_from_the_seed(tmp_path):
    some = list(tunes(50))
    assert len(set(some)) == 50 and some == list(tunes(50)) and some[0] != next(tunes(1, seed=1))
    write_tunes(tmp_path / "tunes.txt", 50)
    assert (tmp_path / "tunes.txt").read_text().splitlines() == some
    with pytest.raises(ValueError, match="at least 0, got -1"):  # whose tune is that of 1
        make_tune(-1)


def test_sounds_are_as_long_and_as_high_as_their_notes(tmp_path):
    rate = 8000
    samples = sound_of([(69, 4), (None, 2), (81, 4)], rate, eighth=0.25)
    assert len(samples) == 1 + round(2.5 * rate) and np.abs(samples).max() < 1
    assert not samples[1 + rate : 1 + round(1.5 * rate)].any()
    for start, frequency in ((1, 440.0), (1 + round(1.5 * rate), 880.0)):
        spectrum = np.abs(np.fft.rfft(samples[start : start + rate]))
        assert spectrum.argmax() == pytest.approx(frequency, abs=1)
    write_wav(tmp_path / "a.wav", samples, rate)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getframerate(), file.getnframes(), file.getsampwidth()) == (rate, len(samples), 2)
        read = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767
    assert np.abs(read - samples).max() < 1e-4


def test_letters_are_two_tones_each():
    assert len({chord_of(letter) for letter in "abcdefghijklmnopqrstuvwxyz"}) == 26
    with pytest.raises(ValueError, match="'ä' has no tones"):
        chord_of("ä")
    sound = spell_in_tones("h", 8000, seed=0, noise=0.0)
    spectrum = np.abs(np.fft.rfft(sound, 8000))
    peaks = sorted(np.argsort(spectrum)[-60:].tolist())
    low, high = chord_of("h")
    assert any(abs(peak - low) < 12 for peak in peaks) and any(abs(peak - high) < 12 for peak in peaks)
    assert np.array_equal(spell_in_tones("ab a", 8000, 3), spell_in_tones("ab a", 8000, 3))
    assert len(sines([440.0], 0.1, 8000)) == 800


def test_a_music_transformer_learns_tunes():
    """Character by character, held-out tunes cost well less than character frequencies say."""
    lines = list(tunes(160))
    letters = sorted(set("".join(lines)))
    stream = torch.tensor([letters.index(character) for character in "".join(lines)])
    rows = stream[: len(stream) // 96 * 96].view(-1, 96)
    train, held_out = rows[:-20], rows[-20:]
    torch.manual_seed(0)
    config = XFMusicTransformerConfig(
        vocab_size=len(letters), hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
        max_position_embeddings=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=None,
    )  # fmt: skip
    model = XFMusicTransformerForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=90)
    generator = torch.Generator().manual_seed(0)
    for _ in range(90):
        batch = train[torch.randint(len(train), (12,), generator=generator)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = model.eval()(held_out, labels=held_out).loss.item()
    share = torch.bincount(train.flatten(), minlength=len(letters)).double() / train.numel()
    floor = -share[held_out[:, 1:]].log().mean().item()
    assert loss < 0.7 * floor, (loss, floor)


@pytest.mark.slow
def test_the_script_goes_on_with_a_tune(tmp_path):
    figures = music.train(tmp_path, 60, steps=2)
    assert figures["perplexity"] > 1 and figures["baseline"] > 1
    tune, written = music.go_on(tmp_path)
    assert tune not in set(tunes(3000))  # the script writes 1500
    assert written.startswith("|".join(tune.split("|")[:3])[:-1])
    for name in ("original", "continued"):
        with wave.open(str(tmp_path / f"{name}.wav")) as file:
            assert file.getnframes() > 1000
