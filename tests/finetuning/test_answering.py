import itertools

import numpy as np
import pytest

from hf_xformers.data import train_tokenizer
from hf_xformers.finetuning.options import TaskOptions
from hf_xformers.finetuning.tasks import build_task
from hf_xformers.finetuning.tasks.answering import best_span

WORDS = [f"w{index}" for index in range(60)]
CONTEXT = " ".join(WORDS)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([CONTEXT, "which word is it", "no answer"], vocab_size=320, num_sentinels=0)


def encoded(tokenizer, rows, **options):
    from datasets import Dataset

    task = build_task(TaskOptions("question-answering", max_length=48, **options))
    data = Dataset.from_list(rows)
    task.settle({"train": data}, None)
    return task, task.encode(data, tokenizer, "train")


def row(answer, start=None):
    start = CONTEXT.index(answer) if start is None else start
    return {"question": "which word is it", "context": CONTEXT, "answers": {"text": [answer], "answer_start": [start]}}


def test_windows_cover_a_long_context_and_overlap(tokenizer):
    _, split = encoded(tokenizer, [row("w30")], doc_stride=10)
    assert len(split.notes) > 2 and max(map(len, split.features["input_ids"])) <= 48
    reached = 0
    for window in split.notes:
        inside = window.spans[window.spans[:, 1] > window.spans[:, 0]]
        assert inside[0][0] <= reached  # no gap: each window begins before the last one ends
        reached = inside[-1][1]
    assert reached == len(CONTEXT)
    firsts = [window.spans[window.spans[:, 1] > window.spans[:, 0]][0][0] for window in split.notes]
    ends = [window.spans[window.spans[:, 1] > window.spans[:, 0]][-1][1] for window in split.notes]
    assert all(begin < end for begin, end in zip(firsts[1:], ends))


@pytest.mark.parametrize("answer", ["w0", "w17", "w30 w31", "w59"])
def test_labels_lead_back_to_the_characters(tokenizer, answer):
    """In every window that holds the answer wholly, the labelled tokens are it; in the others, the first token is."""
    _, split = encoded(tokenizer, [row(answer)], doc_stride=12)
    begin = CONTEXT.index(answer)
    found = 0
    for window, start, end in zip(split.notes, split.features["start_positions"], split.features["end_positions"]):
        inside = window.spans[window.spans[:, 1] > window.spans[:, 0]]
        if inside[0][0] <= begin and begin + len(answer) <= inside[-1][1]:
            assert CONTEXT[window.spans[start][0] : window.spans[end][1]] == answer
            found += 1
        else:
            assert (start, end) == (0, 0)
    assert found


@pytest.mark.parametrize(
    "given, begin",
    [
        ({"answers": 1998}, 3),  # what a CSV makes of texts of digits
        ({"answers": "1998", "answer_start": 12.0}, 12),  # and of numbers beside rows without one
        ({"answers": {"text": "1998", "answer_start": 12}}, 12),
        ({"answers": {"text": ["", "1998"], "answer_start": [0, 12]}}, 12),
    ],
)
def test_forms_of_answers(given, begin, tokenizer):
    _, split = encoded(tokenizer, [{"question": "which word is it", "context": "in 1998 and 1998", **given}])
    (window,), (start,) = split.notes, split.features["start_positions"]
    assert window.spans[start][0] == begin


def test_the_best_window_answers(tokenizer):
    task, split = encoded(tokenizer, [row("w5"), row("w44 w45")], doc_stride=12)
    length = max(map(len, split.features["input_ids"]))
    starts, ends = np.zeros((2, len(split.notes), length))
    for index, (start, end) in enumerate(zip(split.features["start_positions"], split.features["end_positions"])):
        if end:
            starts[index, start] = ends[index, end] = 9.0
    rows = task.predictions((starts, ends), split)
    assert [entry["prediction"] for entry in rows] == ["w5", "w44 w45"]
    assert task.score(rows) == {"exact_match": 100.0, "f1": 100.0}


def test_rows_without_an_answer(tokenizer):
    empty = {"question": "no answer", "context": CONTEXT, "answers": {"text": [], "answer_start": []}}
    task, split = encoded(tokenizer, [row("w5"), empty], doc_stride=12)
    assert task.no_answer
    starts = np.zeros((len(split.notes), 48))
    starts[:, 0] = 3.0
    assert [entry["prediction"] for entry in task.predictions((starts, starts), split)] == ["", ""]
    task.options.null_threshold = 7.0
    assert all(entry["prediction"] for entry in task.predictions((starts, starts), split))
    starts, ends = np.zeros((2, len(split.notes), 48))
    for index, window in enumerate(split.notes):  # the best start stands behind the best end
        inside = np.flatnonzero(window.spans[:, 1] > 0)
        starts[index, inside[-1]] = ends[index, inside[0]] = 1.0
    task.options.n_best = 1
    assert [entry["null_score"] for entry in task.predictions((starts, ends), split)] == [None, None]


def test_best_span_by_hand():
    spans = np.array([[-1, -1], [0, 2], [3, 5], [6, 8]])
    start, end = np.array([1.0, 0, 2, -1]), np.array([0.0, 1, 0, 3])
    assert best_span(start, end, spans, n_best=4, longest=2) == (5.0, 3, 8)
    assert best_span(start, end, spans, n_best=4, longest=1)[0] == 2.0
    assert best_span(start, end, np.full((4, 2), -1), n_best=4, longest=2) is None


def test_best_span_is_the_best_of_all():
    draw = np.random.default_rng(0)
    for _ in range(20):
        start, end = draw.normal(size=(2, 12))
        spans = np.stack([np.arange(12) * 2, np.arange(12) * 2 + 1], 1)
        spans[:3] = -1
        every = [
            (start[i] + end[j], int(spans[i, 0]), int(spans[j, 1]))
            for i, j in itertools.combinations_with_replacement(range(3, 12), 2)
            if j - i < 4
        ]
        assert best_span(start, end, spans, n_best=12, longest=4) == pytest.approx(max(every))
