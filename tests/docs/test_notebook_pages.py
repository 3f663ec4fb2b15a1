"""A notebook becomes a page with its text, code, outputs and pictures."""

from __future__ import annotations

import base64
import json

from scripts.docs.notebooks import notebook


def test_cells_and_outputs(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# A tour\n", "First words."]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [
                {"output_type": "stream", "text": ["1\n"]},
                {"output_type": "display_data", "data": {"image/png": base64.b64encode(b"png").decode()}},
            ],
        },
        {"cell_type": "code", "source": [], "outputs": []},
    ]
    path = tmp_path / "tour.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    text, pictures = notebook(path)
    assert text.startswith("# A tour\n\n[tour.ipynb](tour.ipynb) is this page as a notebook.\n\nFirst words.")
    assert "```python\nprint(1)\n```\n\n```text\n1\n```\n\n![output](tour-0.png)" in text
    assert pictures == {"notebooks/tour-0.png": b"png"}
