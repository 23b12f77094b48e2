"""Five kernels with one fault each: the exercises of lesson 03, which shows them in its cells.

Shape suffixes: S positions, D head dimension, W 2·D, a row of cosines then sines, H heads, P
partitions of a tile. Rows are positions; S is a multiple of 128 unless said otherwise.
"""

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def swap_halves(x_SD):
    """y = (x2, x1), the two halves of D exchanged."""
    S, D = x_SD.shape
    half = D // 2
    out_SD = nl.ndarray((S, D), dtype=x_SD.dtype, buffer=nl.shared_hbm)
    for start in range(0, S, 128):
        x_PD = nl.ndarray((128, D), dtype=x_SD.dtype, buffer=nl.sbuf)
        y_PD = nl.ndarray((128, D), dtype=x_SD.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_PD, src=x_SD[start : start + 128])
        nisa.tensor_copy(dst=y_PD[:, 0:half], src=x_PD[:, half:D])
        nisa.tensor_copy(dst=y_PD[:, half + 1 : D], src=x_PD[:, 1:half])
        nisa.dma_copy(dst=out_SD[start : start + 128], src=y_PD)
    return out_SD


@nki.jit
def double_rows(x_SD):
    """y = 2·x, for an even number of rows S, whatever it is."""
    S, D = x_SD.shape
    out_SD = nl.ndarray((S, D), dtype=x_SD.dtype, buffer=nl.shared_hbm)
    rows = S // 2
    for start in range(0, S, rows):
        x_PD = nl.ndarray((rows, D), dtype=x_SD.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_PD, src=x_SD[start : start + rows])
        nisa.tensor_scalar(dst=x_PD, data=x_PD, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=out_SD[start : start + rows], src=x_PD)
    return out_SD


@nki.jit
def rotate_forward(x_SD, cache_SW):
    """y1 = x1·cos1 − x2·sin1 and y2 = x2·cos2 + x1·sin2."""
    S, D = x_SD.shape
    half = D // 2
    y_SD = nl.ndarray((S, D), dtype=x_SD.dtype, buffer=nl.shared_hbm)
    for start in range(0, S, 128):
        x_PD = nl.ndarray((128, D), dtype=x_SD.dtype, buffer=nl.sbuf)
        cache_PW = nl.ndarray((128, 2 * D), dtype=x_SD.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_PD, src=x_SD[start : start + 128])
        nisa.dma_copy(dst=cache_PW, src=cache_SW[start : start + 128])
        cos, sin = cache_PW[:, 0:D], cache_PW[:, D : 2 * D]
        straight = nl.ndarray((128, D), dtype=x_SD.dtype, buffer=nl.sbuf)
        crossed = nl.ndarray((128, D), dtype=x_SD.dtype, buffer=nl.sbuf)
        y_PD = nl.ndarray((128, D), dtype=x_SD.dtype, buffer=nl.sbuf)
        one, two = crossed[:, 0:half], crossed[:, half:D]
        nisa.tensor_tensor(dst=straight, data1=x_PD, data2=cos, op=nl.multiply)
        nisa.tensor_tensor(dst=one, data1=x_PD[:, 0:half], data2=sin[:, 0:half], op=nl.multiply)
        nisa.tensor_tensor(dst=two, data1=x_PD[:, half:D], data2=sin[:, half:D], op=nl.multiply)
        nisa.tensor_tensor(
            dst=y_PD[:, 0:half], data1=straight[:, 0:half], data2=one, op=nl.subtract
        )
        nisa.tensor_tensor(dst=y_PD[:, half:D], data1=straight[:, half:D], data2=two, op=nl.add)
        nisa.dma_copy(dst=y_SD[start : start + 128], src=y_PD)
    return y_SD


@nki.jit
def rotate_backward(dy_SD, cache_SW):
    """The gradient of x, given that of y, for any cosines and sines."""
    S, D = dy_SD.shape
    half = D // 2
    dx_SD = nl.ndarray((S, D), dtype=dy_SD.dtype, buffer=nl.shared_hbm)
    for start in range(0, S, 128):
        dy_PD = nl.ndarray((128, D), dtype=dy_SD.dtype, buffer=nl.sbuf)
        cache_PW = nl.ndarray((128, 2 * D), dtype=dy_SD.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=dy_PD, src=dy_SD[start : start + 128])
        nisa.dma_copy(dst=cache_PW, src=cache_SW[start : start + 128])
        cos, sin = cache_PW[:, 0:D], cache_PW[:, D : 2 * D]
        straight = nl.ndarray((128, D), dtype=dy_SD.dtype, buffer=nl.sbuf)
        crossed = nl.ndarray((128, D), dtype=dy_SD.dtype, buffer=nl.sbuf)
        dx_PD = nl.ndarray((128, D), dtype=dy_SD.dtype, buffer=nl.sbuf)
        one, two = crossed[:, 0:half], crossed[:, half:D]
        nisa.tensor_tensor(dst=straight, data1=dy_PD, data2=cos, op=nl.multiply)
        nisa.tensor_tensor(dst=one, data1=dy_PD[:, half:D], data2=sin[:, half:D], op=nl.multiply)
        nisa.tensor_tensor(dst=two, data1=dy_PD[:, 0:half], data2=sin[:, 0:half], op=nl.multiply)
        nisa.tensor_tensor(
            dst=dx_PD[:, 0:half], data1=straight[:, 0:half], data2=one, op=nl.subtract
        )
        nisa.tensor_tensor(dst=dx_PD[:, half:D], data1=straight[:, half:D], data2=two, op=nl.add)
        nisa.dma_copy(dst=dx_SD[start : start + 128], src=dx_PD)
    return dx_SD


@nki.jit
def double_heads(x_SHD):
    """y = 2·x on one or two cores, each with its share of the positions (a multiple of 128)."""
    S, H, D = x_SHD.shape
    out_SHD = nl.ndarray((S, H, D), dtype=x_SHD.dtype, buffer=nl.shared_hbm)
    share = S // nl.num_programs(axes=0)
    first = nl.program_id(axis=0) * share
    for start in range(0, share, 128):
        pattern = [[H * D, 128], [1, H * D]]
        source = x_SHD.ap(pattern=pattern, offset=first * D + start * H * D)
        target = out_SHD.ap(pattern=pattern, offset=(first + start) * H * D)
        x_PF = nl.ndarray((128, H * D), dtype=x_SHD.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_PF, src=source)
        nisa.tensor_scalar(dst=x_PF, data=x_PF, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=target, src=x_PF)
    return out_SHD
