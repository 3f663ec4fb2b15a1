# SPDX-License-Identifier: Apache-2.0
"""Models as graphs for runtimes without Python: of whole texts ([`export_onnx`]), and of one step of a decoder, with
its state among inputs and outputs ([`export_step`], [`export_step_onnx`])."""

from .decoding_step import DecodingStep, StepReport
from .state import StepState
from .step import export_step, export_step_onnx
from .whole_text import OnnxReport, export_onnx

__all__ = [
    "DecodingStep",
    "OnnxReport",
    "StepReport",
    "StepState",
    "export_onnx",
    "export_step",
    "export_step_onnx",
]
