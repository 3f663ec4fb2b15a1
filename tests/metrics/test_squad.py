import pytest

from hf_xformers.metrics import normalize_answer, squad


def test_normalisation():
    assert normalize_answer(" The  Cat's, an Apple! ") == "cats apple"


def test_the_best_of_several_answers_counts():
    scores = squad(["in Paris, France", "1990"], [["Paris", "Paris France"], ["1989", "the 1990"]])
    # words of the first: in paris france against paris (2/4) and paris france (4/5); the second is exact
    assert scores == {"exact_match": 50.0, "f1": pytest.approx(100 * (4 / 5 + 1) / 2)}


def test_words_count_as_often_as_they_stand():
    assert squad(["x x y"], [["x y y"]])["f1"] == pytest.approx(100 * 2 / 3)


def test_questions_without_an_answer():
    guess, gold = ["", "paris", ""], [[], [], ["rome"]]
    assert squad(guess, gold, no_answer=True) == {"exact_match": pytest.approx(100 / 3), "f1": pytest.approx(100 / 3)}
    assert squad(["the"], [["a"]])["f1"] == 0.0  # SQuAD 1: no words in common
    assert squad(["the"], [["a"]], no_answer=True)["f1"] == 100.0
    # A gold answer without words is none: what is left has to be met.
    assert squad([""], [["the", "cat"]], no_answer=True) == {"exact_match": 0.0, "f1": 0.0}
