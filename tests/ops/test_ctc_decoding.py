"""The search for a transcript against all alignments of small cases."""

import itertools

import pytest
import torch

from hf_xformers.ops.ctc_decoding import best_path, prefix_beam_search


def all_texts(log_probs, blank):
    """The probability of every text of labels, summed over all its paths."""
    frames, labels = log_probs.shape
    found = {}
    for path in itertools.product(range(labels), repeat=frames):
        text = tuple(label for label, _ in itertools.groupby(path) if label != blank)
        score = sum(log_probs[t, label].item() for t, label in enumerate(path))
        found.setdefault(text, []).append(score)
    return {text: torch.tensor(scores, dtype=torch.float64).logsumexp(0).item() for text, scores in found.items()}


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_with_beams_enough_the_search_is_exact(frames, blank):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        log_probs = (2 * torch.randn(frames, 3, generator=generator, dtype=torch.float64)).log_softmax(-1)
        expected = all_texts(log_probs, blank)
        found = prefix_beam_search(log_probs, 1000, blank)
        assert {tuple(text) for text, _ in found} == set(expected)
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
        for text, score in found:
            assert score == pytest.approx(expected[tuple(text)], abs=1e-9)


def test_a_text_of_many_paths_beats_the_best_path():
    """Two frames of blank 0.6, a 0.4: the best path is blank (0.36), the best text is a (0.64)."""
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert best_path(log_probs[None], None, 0) == [[]]
    text, score = prefix_beam_search(log_probs, 2, 0)[0]
    assert text == [1] and score == pytest.approx(torch.tensor(0.64).log().item(), abs=1e-6)


def test_best_path():
    ids = torch.tensor([[1, 1, 0, 1, 2, 2], [2, 0, 0, 2, 1, 1]])
    logits = torch.nn.functional.one_hot(ids, 3).double()
    assert best_path(logits, None, 0) == [[1, 1, 2], [2, 2, 1]]
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    assert best_path(logits, mask, 0) == [[1], []]


def test_what_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        prefix_beam_search(torch.zeros(2, 2), 0, 0)
    with pytest.raises(ValueError, match="of one row"):
        prefix_beam_search(torch.zeros(1, 2, 2), 1, 0)
