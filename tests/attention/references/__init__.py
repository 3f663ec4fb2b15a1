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

# One of each mechanism, as a decoder or not: those whose backward pass is their own are traced in both passes.
# tests/common traces what is not here.
# fmt: off
COMPILED = {
    "adaptive_span": True, "talking_heads dynamic": True, "realformer": True, "transformer_xl": False, "band": True,
    "bigbird": False, "linear_transformer": True, "performer hyperbolic": True, "lolcats": True, "delta_net elu": True,
    "luna tied": True, "clustered improved": False,
}
TRACED = {
    "adaptive_span dynamic": False, "synthesizer dot+factorized_dense+fixed_random+random": True,
    "sparse fixed verts": True, "linformer layerwise": False, "nystromformer conv": False, "csalr": False,
    "set_transformer": False, "memory_compressed conv": True, "low_rank_band gate": True,
    "adaptively_sparse learned": False, "collaborative": False, "lazyformer weights": False,
    "predictive evolving": False, "localness query": False, "gaussian plain": False, "multi_scale": False,
    "diet dilated 1": True, "poolingformer ldconv": False, "transient_global": False, "arccos": False, "rfa": False,
    "dpfp": False, "hedgehog": True, "average gate": True, "sinkhorn plain": True, "clustered": False,
    "routing": False, "differential": False, "moba": False, "native_sparse": True, "latent": True,
    "gated_delta_net": True, "kimi_delta_attention": True, "mamba2": True, "gla": True, "hgrn2": True,
    "retnet": True, "lightning_attention": True,
}
# fmt: on
