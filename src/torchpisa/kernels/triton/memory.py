"""Shared by all kernels: find tensors through the table, read them, and write them rounded."""

import triton
import triton.language as tl

__all__ = ["COLUMNS", "address", "gradient", "read", "span", "write"]

# Columns of the table, one row of 64-bit integers per parameter.
COLUMNS = tl.constexpr(10)
PARAM = tl.constexpr(0)
GRAD = tl.constexpr(1)
DUAL = tl.constexpr(2)
MEMORY = tl.constexpr(3)  # state of the preconditioner: second moment, momentum or rows
PENDING = tl.constexpr(4)
STEP = tl.constexpr(5)
SIGMA = tl.constexpr(6)  # where it follows the gradients, with the level that it follows
LEVEL = tl.constexpr(7)
SIZE = tl.constexpr(8)
FIRST = tl.constexpr(9)  # number of the parameter's first block


@triton.jit
def address(table, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer in a column; `ALIGNED` promises a multiple of 16, for wide accesses."""
    pointer = tl.load(table + tensor * COLUMNS + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def span(table, tensor_of, BLOCK: tl.constexpr):
    """Return this program's parameter, its first element there, and how many elements are left."""
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program)
    start = (program - tl.load(table + tensor * COLUMNS + FIRST)) * BLOCK
    return tensor, start, tl.load(table + tensor * COLUMNS + SIZE) - start


@triton.jit
def read(pointers, mask, MASKED: tl.constexpr):
    """Load as float32; without `MASKED`, for whole blocks, in wide accesses."""
    x = tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)
    return x.to(tl.float32)


@triton.jit
def write(pointers, x, random, mask, MASKED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Store float32 `x`, rounded to nearest or, to bfloat16, up or down at random without bias."""
    if pointers.dtype.element_ty == tl.bfloat16:
        # bfloat16 is the upper half of float32: carry from the lower half, at random or to the
        # nearest even number. Triton's interpreter would only cut the lower half off.
        bits = x.to(tl.int32, bitcast=True)
        carry = (random & 0xFFFF).to(tl.int32) if STOCHASTIC else 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, ((bits + carry) & -65536).to(tl.float32, bitcast=True), x)
    x = x.to(pointers.dtype.element_ty)
    if MASKED:
        tl.store(pointers, x, mask=mask)
    else:
        tl.store(pointers, x)


@triton.jit
def gradient(g, w, grad_scale, weight_decay, MAXIMIZE: tl.constexpr, DECAYS: tl.constexpr):
    """Return g_i from the stored gradient: unscaled, negated to maximise, plus the L2 term."""
    if grad_scale is not None:
        g = g / tl.load(grad_scale)
    if MAXIMIZE:
        g = -g
    if DECAYS:
        g = g + weight_decay * w
    return g
