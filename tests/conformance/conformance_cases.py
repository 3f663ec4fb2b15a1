"""What scripts/conformance.py has pytest collect: one unittest class for each family that was asked for."""

import json
import os
from pathlib import Path

from case_factory import build_cases
from conformance_plugin import spare_override_dicts

spare_override_dicts()  # before transformers' tests are imported, which take that function by its name
for _case in build_cases(json.loads(Path(os.environ["HF_XFORMERS_CONFORMANCE_SPEC"]).read_text())):
    globals()[_case.__name__] = _case
del _case
