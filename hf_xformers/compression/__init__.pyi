# Written by scripts/make_stubs.py.
from .choice import Pruning as Pruning
from .distillation import Distiller as Distiller
from .distillation import distill as distill
from .distilling_options import Distilling as Distilling
from .head_pruning import prune_heads as prune_heads
from .layers import prune_layers as prune_layers
from .methods import METHODS as METHODS
from .methods import build_method as build_method
from .pruning import prune as prune
from .quantization import Quantizer as Quantizer
from .quantization import Quantizing as Quantizing
from .quantization import quantize as quantize
from .report import Measuring as Measuring
from .report import Row as Row
from .report import compare as compare
from .report import measure as measure
from .report import read_steps as read_steps
from .report import table as table
from .report import write_table as write_table
from .students import StudentChoice as StudentChoice
from .students import build_student as build_student

__all__ = [
    "Distiller",
    "Distilling",
    "METHODS",
    "Measuring",
    "Pruning",
    "Quantizer",
    "Quantizing",
    "Row",
    "StudentChoice",
    "build_method",
    "build_student",
    "compare",
    "distill",
    "measure",
    "prune",
    "prune_heads",
    "prune_layers",
    "quantize",
    "read_steps",
    "table",
    "write_table",
]
