"""Compile a kernel for an H100, without one: `python -m tests.ops.compile_for_hopper MODULE KERNEL CONSTANTS TYPES`."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.helpers import outside_the_interpreter

TYPES = {  # of arguments that are neither bfloat16 pointers nor integers
    "*fp32": (
        "sizes_ptr", "block_sizes_ptr", "slope_ptr", "intercept_ptr", "z_ptr", "rows_ptr", "delta_ptr", "mean_ptr",
        "gain_ptr",
    ),
    "*i32": ("broken_ptr", "key_lengths_ptr", "doc_start_ptr", "doc_stop_ptr"),
    "fp32": ("exponent", "eps"),
}  # fmt: skip


def compile_kernel(module: str, kernel: str, constants: dict[str, Any], cache: Path, **types: str) -> dict[str, Any]:
    """Bytes of shared memory, numbers of asynchronous products, of `dead_branches` and of barriers that are not ended,
    `overwritten` tiles, and loads before and after the wait for the previous kernel, of the compiled kernel.

    In Gluon there must be no dead branches.
    """
    words = module, kernel, json.dumps(constants), json.dumps(types)
    made = outside_the_interpreter("tests.ops.compile_for_hopper", *words, cache=cache)
    assert "hopper" not in module or made["dead branches"] == 0, "select the branch when compiling"
    return made


def overwritten(ttgir: str) -> list[str]:
    """Tiles with one buffer that is filled again while a product may still be reading it.

    Triton gives a tile that it fetches ahead a second buffer if asynchronous products read it, but not if an ordinary
    product reads it as well: so with tiles of 32 rows by 64 keys, where dk came out wrong on an H200.
    """
    lines = ttgir.splitlines()
    found = []
    for alloc in re.findall(r"%(\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x\d+x\d+x", ttgir):
        views = {alloc}
        last_read = None
        for number, line in enumerate(lines):
            names = re.findall(r"%([\w#]+)", line)
            if "ttg.memdesc_" in line and views & set(names[1:]):
                views.add(names[0])
            if "warp_group_dot " in line and views & set(names[1:]):
                last_read = number
            copies = "async_copy_global_to_local" in line and views & set(names[1:])
            if copies and last_read is not None:
                waits = [int(n) for text in lines[last_read:number] for n in re.findall(r"pendings = (\d+)", text)]
                if not waits or min(waits) > 0:
                    found.append(alloc)
                    break
    return found


def dead_branches(source: str) -> int:
    """Branches on a constant in what Triton makes of a kernel's text, before any pass removes them.

    Triton 3.6 keeps them in Gluon kernels, and with assertions it cannot compile those that load by pointers.
    """
    constant = set(re.findall(r"%([\w#]+) = arith\.constant (?:true|false)", source))
    return sum(condition in constant for condition in re.findall(r"scf\.if %([\w#]+)", source))


def _tiles_of(rows: str, columns: str, element: str = "bf16") -> str:
    """The type of a descriptor that the host makes for a kernel in Gluon; all elements have 16 bits."""
    from triton.experimental.gluon import language as gl

    block = [1, 1, int(rows), int(columns)]
    return f"tensordesc<{element}{block},{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}>"


def main(module: str, name: str, constants: dict[str, Any], types: dict[str, str]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(importlib.import_module(module), name)
    warps = constants.pop("warps")
    known = {name: kind for kind, names in TYPES.items() for name in names} | types
    signature, values, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[(i,)] = "constexpr", constants[argument]
            continue
        if known.get(argument, "").startswith("tiles "):
            signature[argument] = _tiles_of(*known[argument].split()[1:])
            continue
        signature[argument] = known.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")
        if argument.endswith("_ptr") or "stride" in argument or argument == "row_plane":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source_of = GluonASTSource if "hopper" in module else ASTSource
    source = source_of(kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": True}  # as launch.start_kernel
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    products = made.asm["ptx"].count("wgmma.mma_async")
    ttgir = made.asm["ttgir"]
    before, _, after = made.asm["ptx"].partition("griddepcontrol.wait")
    found = {
        "shared": made.metadata.shared, "wgmma": products, "overwritten": overwritten(ttgir),
        "dead branches": dead_branches(made.asm["source"]),
        "barriers left": ttgir.count("ttng.init_barrier") - ttgir.count("ttng.inval_barrier"),
        "loads": [len(re.findall(r"ld\.global|cp\.async(?:\.bulk)?[\w.:]*\.global", text)) for text in (before, after)],
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4]))
