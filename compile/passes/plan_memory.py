"""The last phases: what is left of standard operators becomes kernels, then memory is planned."""

from __future__ import annotations

import tvm
from tvm import relax


def lower_remaining() -> tvm.transform.Pass:
    """Standard operators that no pass took (reshapes, slices, additions) become fused kernels.

    Products with a transposed matrix read it where it lies; other transpositions are copies.
    """
    return tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            relax.transform.FuseTransposeMatmul(),
            relax.transform.LegalizeOps(),
            relax.transform.RewriteDataflowReshape(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(),
        ],
        name="lower_remaining",
    )


def plan_memory() -> tvm.transform.Pass:
    """Every tensor gets a place in a planned storage: the function is then a list of calls."""
    return tvm.transform.Sequential(
        [
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            relax.transform.StaticPlanBlockMemory(),
        ],
        name="plan_memory",
    )
