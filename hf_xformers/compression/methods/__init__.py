# SPDX-License-Identifier: Apache-2.0
"""Methods of distillation: one file each. A method knows which parts of two passes it compares, and what it needs of
the models.

```python
>>> from hf_xformers.compression.methods import build_method

>>> build_method({"type": "distilbert", "temperature": 2.0}).summary
'soft predictions, and the direction of the last states'
```
"""

from .base import METHODS, DistillationMethod, Pass, build_method

__all__ = ["METHODS", "DistillationMethod", "Pass", "build_method"]
