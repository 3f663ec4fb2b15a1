"""Names that are imported when they are used, and names on their way out."""

import warnings

import pytest

from hf_xformers.core.lazy import lazily


def test_a_former_name_still_works_and_says_what_to_write():
    find = lazily("hf_xformers.core", {"weight_of": "reading_weights"}, {"read_weight": ("weight_of", "0.3")})
    wanted = find("weight_of")  # importing torch changes the filters of warnings
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        found = [find("read_weight") for _ in range(3)]
    assert all(function is wanted for function in found)
    assert [str(one.message) for one in told] == [
        "`hf_xformers.core.read_weight` goes in version 0.3; write `hf_xformers.core.weight_of`."
    ]
    assert told[0].category is FutureWarning and told[0].filename == __file__
    with pytest.raises(AttributeError, match="no attribute 'neither'"):
        find("neither")
