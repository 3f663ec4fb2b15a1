"""A fuzzer of free mixes: whatever is drawn is either refused at construction, in one sentence, or works.

`draw.py` draws, `check.py` says what must hold, `shrink.py` makes what fails small, and `python -m tests.mixes` runs
many.
"""
