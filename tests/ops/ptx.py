"""The PTX instructions of inline assembly, on numpy arrays: what `tl.inline_asm_elementwise` does on a CPU.

Registers are arrays of 32-bit patterns (16-bit ones for the constraint h). Approximate instructions are exact here,
but for tanh, which has 11 bits on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

Registers = dict[str, np.ndarray]
NUMPY = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32}


def _flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _saturate(x: np.ndarray) -> np.ndarray:
    return np.clip(np.nan_to_num(x, nan=0.0), 0, 1)


def _single(compute: Callable, flush: bool = True) -> Callable:
    """An instruction on float32."""

    def run(*registers: np.ndarray) -> np.ndarray:
        numbers = [x.view(np.float32) for x in registers]
        numbers = [_flush(x) for x in numbers] if flush else numbers
        result = np.asarray(compute(*(x.astype(np.float64) for x in numbers))).astype(np.float32)
        return (_flush(result) if flush else result).view(np.uint32)

    return run


def _eleven_bits(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 2.0**11) / 2.0**11, exponent)


def _pairs(compute: Callable) -> Callable:
    """An instruction on two float16 in each register; float64 in between, so that results are rounded once."""

    def run(*registers: np.ndarray) -> np.ndarray:
        numbers = (np.ascontiguousarray(x).view(np.float16).astype(np.float64) for x in registers)
        return np.asarray(compute(*numbers)).astype(np.float16).view(np.uint32)

    return run


def _two_halves(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    half = [x.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32) for x in (upper, lower)]
    return half[0] << 16 | half[1]


INSTRUCTIONS: dict[str, Callable] = {
    "abs.f32": lambda x: x & np.uint32(0x7FFFFFFF),
    "neg.f32": lambda x: x ^ np.uint32(0x80000000),
    "ex2.approx.ftz.f32": _single(np.exp2),
    "lg2.approx.ftz.f32": _single(np.log2),
    "rcp.approx.ftz.f32": _single(lambda x: 1 / x),
    "tanh.approx.f32": _single(lambda x: _eleven_bits(np.tanh(x)), flush=False),
    "fma.rn.ftz.sat.f32": _single(lambda a, b, c: _saturate(a * b + c)),
    "add.rn.f16x2": _pairs(lambda a, b: a + b),
    "mul.rn.f16x2": _pairs(lambda a, b: a * b),
    "fma.rn.f16x2": _pairs(lambda a, b, c: a * b + c),
    "fma.rn.sat.f16x2": _pairs(lambda a, b, c: _saturate(a * b + c)),
    "max.f16x2": _pairs(np.fmax),
    "max.NaN.f16x2": _pairs(np.maximum),
    "cvt.rn.f16x2.f32": _two_halves,
    "mov.b32": lambda x: x,
}


def run(text: str, inputs: list[np.ndarray]) -> np.ndarray:
    """What is in register $0 after the instructions of text, with inputs in $1, $2, ..."""
    registers: Registers = {f"${i}": x for i, x in enumerate(inputs, 1)}

    def operand(name: str) -> np.ndarray:
        if name.startswith("{"):  # two halves, the first in the lower bits
            low, high = (registers[part.strip()].astype(np.uint32) for part in name[1:-1].split(","))
            return low | high << 16
        return registers[name] if name in registers else np.full(inputs[0].shape, int(name, 0), np.uint32)

    statements = text.strip().removeprefix("{ ").removesuffix("}") if text.strip().startswith("{ ") else text
    for statement in filter(None, (part.strip() for part in statements.split(";"))):
        name, rest = statement.split(None, 1)
        if name == ".reg":
            continue
        to, *operands = (part.strip() for part in re.split(r",(?![^{]*\})", rest))
        with np.errstate(all="ignore"):
            registers[to] = INSTRUCTIONS[name](*map(operand, operands))
    return registers["$0"]


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack, **_) -> tl.tensor:
    """In place of tl.inline_asm_elementwise."""
    asm, pack, dtype = (getattr(x, "value", x) for x in (asm, pack, dtype))
    args = [getattr(x, "value", x) for x in args]
    numbers = [x.handle.data if isinstance(x, tl.tensor) else np.float32(x) for x in args]
    shape = np.broadcast_shapes(*(x.shape for x in numbers))
    arrays = [np.ascontiguousarray(np.broadcast_to(x, shape)) for x in numbers]
    widths = [array.dtype.itemsize for array in arrays]
    assert all(width * pack == 4 or (width, pack) == (2, 1) for width in widths), (widths, pack)
    registers = [
        array.reshape(-1).view(np.uint16 if width * pack == 2 else np.uint32) for array, width in zip(arrays, widths)
    ]
    result = run(asm, registers).view(NUMPY[dtype.name]).reshape(shape)
    of = next(x.type for x in args if isinstance(x, tl.tensor))
    return tl.tensor(TensorHandle(result, dtype), of.with_element_ty(dtype) if of.is_block() else dtype)
