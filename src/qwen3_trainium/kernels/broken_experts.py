"""Lesson 04's kernel exercises: each has one fault, and its solution is in the lesson, folded.

Shape suffixes: R rows, P slots of a block, D model dimension, F width, K tiles of 128 of D.
"""

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def project(xT_DP, wT_DF):
    """x · wᵀ for 128 rows: a sum over D, 128 terms at a time, collected in PSUM."""
    D, F = wT_DF.shape
    out_PF = nl.ndarray((128, F), dtype=nl.float32, buffer=nl.shared_hbm)
    psum_PF = nl.ndarray((128, F), dtype=nl.float32, buffer=nl.psum)
    for d in range(0, D, 128):
        x_KP = nl.ndarray((128, 128), dtype=xT_DP.dtype, buffer=nl.sbuf)
        w_KF = nl.ndarray((128, F), dtype=wT_DF.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_KP, src=xT_DP[d : d + 128])
        nisa.dma_copy(dst=w_KF, src=wT_DF[d : d + 128])
        nisa.nc_matmul(dst=psum_PF, stationary=x_KP, moving=w_KF, accumulate=False)
    sbuf_PF = nl.ndarray((128, F), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=sbuf_PF, src=psum_PF)
    nisa.dma_copy(dst=out_PF, src=sbuf_PF)
    return out_PF


@nki.jit
def weight_gradient(dgate_RF, x_RD, rows_P1):
    """Σ over a block's rows of dgate · xᵀ; slots whose row is R or more are padding."""
    F, D = dgate_RF.shape[1], x_RD.shape[1]
    dw_FD = nl.ndarray((F, D), dtype=nl.float32, buffer=nl.shared_hbm)
    slots_P1 = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=slots_P1, src=rows_P1)
    dgate_PF = nl.ndarray((128, F), dtype=dgate_RF.dtype, buffer=nl.sbuf)
    x_PD = nl.ndarray((128, D), dtype=x_RD.dtype, buffer=nl.sbuf)
    nisa.memset(dst=dgate_PF, value=1.0)
    nisa.memset(dst=x_PD, value=1.0)
    dgate_rows = dgate_RF.ap(pattern=[[F, 128], [1, F]], vector_offset=slots_P1)
    x_rows = x_RD.ap(pattern=[[D, 128], [1, D]], vector_offset=slots_P1)
    nisa.dma_copy(dst=dgate_PF, src=dgate_rows, oob_mode=nisa.oob_mode.skip)
    nisa.dma_copy(dst=x_PD, src=x_rows, oob_mode=nisa.oob_mode.skip)
    psum_FD = nl.ndarray((F, D), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=psum_FD, stationary=dgate_PF, moving=x_PD)
    sbuf_FD = nl.ndarray((F, D), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=sbuf_FD, src=psum_FD)
    nisa.dma_copy(dst=dw_FD, src=sbuf_FD)
    return dw_FD
