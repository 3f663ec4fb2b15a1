import pytest

from hf_xformers.metrics import backend, compute


class Script:
    """Stands for a metric that `evaluate` loaded: answers as its script does, remembers how it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, None

    def compute(self, **given):
        self.asked = given
        return self.answer


@pytest.fixture
def script(monkeypatch):
    def install(answer):
        made = Script(answer)
        monkeypatch.setattr(backend, "_script", lambda name: made)
        return made

    return install


def test_without_a_script_ours_answers(monkeypatch):
    monkeypatch.setattr(backend, "_script", lambda name: None)
    assert compute("accuracy", [1, 0], [1, 1]) == {"accuracy": 0.5}
    with pytest.raises(ValueError, match="evaluate cannot load its metric 'squad_v2'.*--metric_backend own"):
        compute("squad", ["a"], [["a"]], backend="evaluate", no_answer=True)


def test_a_script_answers_under_our_names(script):
    asked = script({"score": 12.5, "counts": [1]})
    assert compute("sacrebleu", ["a"], ["b"]) == {"bleu": 12.5}
    assert asked.asked == {"predictions": ["a"], "references": [["b"]]}
    asked = script({"PER": {"f1": 1.0}, "overall_f1": 0.5})
    assert compute("seqeval", [["O"]], [["O"]]) == {"overall_f1": 0.5}
    script({"rouge1": [0.5, 1.0]})
    assert compute("rouge", ["a", "b"], ["b", "b"]) == {"rouge1": 75.0}
    asked = script({"exact": 50.0, "f1": 60.0, "HasAns_f1": 1.0})
    assert compute("squad", ["a"], [[]], no_answer=True) == {"exact_match": 50.0, "f1": 60.0}
    assert asked.asked["references"] == [{"id": "0", "answers": {"text": [], "answer_start": []}}]
    assert asked.asked["predictions"][0]["no_answer_probability"] == 0.0
    asked = script({"f1": 0.25})
    assert compute("f1", [1], [0], average="macro") == {"f1": 0.25} and asked.asked["average"] == "macro"


def test_what_is_undefined_is_zero(script):
    script({"pearsonr": float("nan")})
    assert compute("pearsonr", [1.0, 1.0], [0.0, 1.0]) == {"pearsonr": 0.0}
    assert compute("pearsonr", [1.0, 1.0], [0.0, 1.0], backend="own") == {"pearsonr": 0.0}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("acuracy", [1], [1]), "unknown metric 'acuracy': choose one of accuracy, f1"),
        (("accuracy", [1], [1, 2]), "1 predictions for 2 references"),
        (("accuracy", [], []), "nothing to compare"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ValueError, match=words):
        compute(*arguments, backend="own")
    with pytest.raises(ValueError, match="unknown metric backend 'mine': choose one of auto, evaluate, own"):
        compute("accuracy", [1], [1], backend="mine")
