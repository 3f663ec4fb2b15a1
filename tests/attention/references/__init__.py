"""The literal equation of every attention: `REFERENCES`, by name of the mechanism and what is particular about it."""

from tests.attention.references import compressed, content, linear, patterns, recent, recurrent, softmax
from tests.attention.references.table import Reference

REFERENCES: dict[str, Reference] = {
    **softmax.REFERENCES,
    **patterns.REFERENCES,
    **linear.REFERENCES,
    **compressed.REFERENCES,
    **content.REFERENCES,
    **recent.REFERENCES,
    **recurrent.REFERENCES,
}

# One of each mechanism that has much of its own to trace, as a decoder or not. tests/common traces what is not here.
# fmt: off
COMPILED = {
    "adaptive_span": True, "adaptive_span dynamic": False, "talking_heads dynamic": True, "realformer": True,
    "synthesizer dot+factorized_dense+fixed_random+random": True, "transformer_xl": False, "band": True,
    "sparse fixed verts": True, "bigbird": False, "linear_transformer": True, "performer hyperbolic": True,
    "lolcats": True, "delta_net elu": True, "luna tied": True, "linformer layerwise": False,
    "nystromformer conv": False, "csalr": False, "set_transformer": False, "clustered improved": False,
    "memory_compressed conv": True, "low_rank_band gate": True,
}
# fmt: on
