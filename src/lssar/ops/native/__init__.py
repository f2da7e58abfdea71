"""Compiled strips for the CPU (optional): the same results as the PyTorch strips of `tiled.py`, faster.

The C sources beside this file are built into the extension module `_kernels` when the package is installed and there is
a compiler; without it `supports` is False and `tiled.py` does the work. LSSAR_NATIVE and LSSAR_NATIVE_ISA are in
lssar/switches.py. How it works, and what it gains: docs/cpu.md.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from functools import lru_cache

import torch
from torch import Tensor

from lssar import switches
from lssar.specs import AttentionSpec

_ACTIVATIONS = {"softplus": 0, "exp": 1}
_OUT_OF_MEMORY = -1


class _Problem(ctypes.Structure):
    """`struct problem` of problem.h, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "key_heads", "group", "queries", "keys", "head_size", "value_size")
        ),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "d_out", "out", "d_q", "d_k", "d_v")),
        *((name, ctypes.c_void_p) for name in ("gain", "threshold", "d_gain", "d_threshold", "start", "stop")),
        *((f"{name}_{axis}_stride", ctypes.c_int64) for name in ("start", "stop") for axis in ("batch", "query")),
        *((name, ctypes.c_int64) for name in ("activation", "cosine", "log_n", "reweighted", "normalize")),
        ("scale", ctypes.c_double),
        ("p", ctypes.c_double),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
    )


def _load() -> ctypes.CDLL | None:
    if not switches.NATIVE:
        return None
    found = importlib.util.find_spec("lssar.ops.native._kernels")
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
    except OSError:  # built for another machine
        return None
    library.lssar_isa.restype = ctypes.c_char_p
    library.lssar_problem_size.restype = ctypes.c_int64
    # An old build beside newer sources must not be called.
    return library if library.lssar_problem_size() == ctypes.sizeof(_Problem) else None


def _torch_threads() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that PyTorch has loaded, where it has that one."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


_library = _load()
_parallel = None if _library is None else _torch_threads()
_asked_isa = switches.NATIVE_ISA.encode()


def isa() -> str | None:
    """The instruction set in use; None where there is no native kernel."""
    name = None if _library is None else _library.lssar_isa(_asked_isa)
    return None if name is None else name.decode()


def supports(q: Tensor, spec: AttentionSpec, mask: Tensor | None) -> bool:
    """Whether it computes this; half types go through float32."""
    return (
        _library is not None
        and q.device.type == "cpu"
        and q.dtype != torch.float64
        and mask is None
        and _covers(spec)
        and isa() is not None
    )


@lru_cache(maxsize=256)
def _covers(spec: AttentionSpec) -> bool:
    plain = spec.bias == "none" and spec.recentre == "none" and not spec.negate
    return plain and spec.divisor == "l1" and spec.activation in _ACTIVATIONS


def forward(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, spec: AttentionSpec, *,
    gain: Tensor | None = None, threshold: Tensor | None = None, normalize: bool = False,
) -> Tensor:  # fmt: skip
    """Output (B, Hq, Lq, Dv); start and stop are (B, Lq), gain and threshold (Hq,).

    Where the spec is cosine, q and k are unit vectors already, or with `normalize` of any length.
    """
    o = q.new_empty(*q.shape[:3], v.shape[3])
    _run(q, k, v, start, stop, spec, normalize, gain=gain, threshold=threshold, out=o)
    return o


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, spec: AttentionSpec, *,
    gain: Tensor | None = None, threshold: Tensor | None = None, normalize: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, k and v as they are given here, and of gain and threshold for each row (B, Hq, Lq)."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    d_gain, d_threshold = (None if x is None else q.new_empty(q.shape[:3]) for x in (gain, threshold))
    _run(
        q, k, v, start, stop, spec, normalize, gain=gain, threshold=threshold, d_out=do, d_q=dq, d_k=dk, d_v=dv,
        d_gain=d_gain, d_threshold=d_threshold,
    )  # fmt: skip
    return dq, dk, dv, d_gain, d_threshold


def _run(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, spec: AttentionSpec, normalize: bool, *,
    gain: Tensor | None, threshold: Tensor | None, **others: Tensor | None,
) -> None:  # fmt: skip
    """Fills the outputs among `others`, which are contiguous."""
    (B, Hq, Lq, D), (_, Hkv, Lk, Dv) = q.shape, v.shape
    if min(B, Hkv, Lq, Lk, Dv) == 0:  # nothing to see
        for name, x in others.items():
            if x is not None and name != "d_out":
                x.zero_()
        return
    if threshold is None and spec.threshold != 1:
        threshold = torch.full((Hq,), spec.threshold)
    given = {"q": q, "k": k, "v": v, "gain": gain, "threshold": threshold, **others}
    tensors = {name: x.contiguous() for name, x in given.items() if x is not None}
    start, stop = (x.to(torch.int64) for x in (start, stop))
    assert _library is not None
    problem = _Problem(
        batch=B, key_heads=Hkv, group=Hq // Hkv, queries=Lq, keys=Lk, head_size=D, value_size=Dv,
        start=start.data_ptr(), start_batch_stride=start.stride(0), start_query_stride=start.stride(1),
        stop=stop.data_ptr(), stop_batch_stride=stop.stride(0), stop_query_stride=stop.stride(1),
        activation=_ACTIVATIONS[spec.activation], cosine=spec.cosine, log_n=spec.log_n,
        normalize=normalize and spec.cosine, scale=math.log(D) if spec.scale == "log_d" else 1 / math.sqrt(D),
        reweighted=spec.p is not None, p=spec.p or 0.0, threads=torch.get_num_threads(), parallel=_parallel,
        **{name: x.data_ptr() for name, x in tensors.items()},
    )  # fmt: skip
    error = _library.lssar_run(ctypes.byref(problem), _asked_isa)
    if error == _OUT_OF_MEMORY:
        raise MemoryError("no memory for the working space of the attention kernel")
    if error:
        raise RuntimeError(f"the attention kernel has no instruction set {_asked_isa.decode()!r} on this machine")
