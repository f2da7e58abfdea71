"""The installed Triton must be able to compile the kernels for Hopper, which needs no GPU.

What they compute is tested by test_fused.py and test_activations.py on a GPU and in the interpreter, and, for Gluon, by
test_hopper_on_cpu.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import lssar
from tests.ops.compile_for_hopper import compile_kernel, overwritten

pytest.importorskip("triton")
from lssar.ops.fused.linear import Plan
from lssar.ops.fused.loss import BLOCK, WARPS
from lssar.ops.fused.tiles import HOPPER, WINDOW_KINDS, WINDOW_PARTS, Tile
from lssar.ops.fused.window_op import _mechanism

SEEN = {"CAUSAL": True, "WINDOWED": True, "PACKED": True, "HAS_LENGTHS": True}
MULTIPROCESSOR = 228 * 1024
"""Bytes of shared memory."""


def compile_lssar(module, kernel, D, mechanism, tile, cache):
    constants = {
        "P": 0 if "any power" in mechanism else 15, "HAS_GAIN": "gain" in mechanism,
        "REWEIGHT": mechanism != "lssa", "LOG_D": math.log(D), "D": D, "BLOCK_D": D, "LOG_DEGREE": 3,
        "DOT": "tf32", "EXACT_QUERIES": True, "TMA": tile.tma, "BLOCK_M": tile.m, "BLOCK_N": tile.n,
        "STAGES": tile.stages, "BLOCK_N1": tile.n1 or tile.n, "STAGES1": tile.stages1 or tile.stages,
        "STEEP": "steep" in mechanism, "HOST_TILES": False, "CACHE": 2**22, "warps": tile.warps, **SEEN,
        "REPAIR": "repair" in mechanism, "SHORT_FORMS": True,
    }  # fmt: skip
    types = {"k_ptr": "*fp16"}
    rows = ("q_all", "o_all", "do_all", "dq_all", "passed_q_all") if kernel.startswith("query") else ()
    types |= dict.fromkeys(rows, f"tiles {tile.m} {D}") | {"o_all": f"tiles {tile.m} {D} fp16"}
    if kernel.startswith("forward") and "hopper" in module:
        types |= dict.fromkeys(("q_all", "o_all"), f"tiles {tile.m} {D} fp16")
    return compile_kernel(module, kernel, constants, cache, **types)


def compile_activation(kernel, D, activation, p, tile, cache):
    constants = {
        "ACTIVATION": activation, "DIVISOR": "l1", "SIGN": 1.0, "SCALE": D**-0.5, "LOG_N": False, "BIAS": "-log_n",
        "LENGTH": 1024.0, "LOG_LENGTH": math.log(1024), "GAMMA": 1.0, "P": p, "REWEIGHT": p > 0, "COSINE": False,
        "D": D, "BLOCK_D": D,
        "DOT": "tf32", "BLOCK_M": tile.m, "BLOCK_N": tile.n, "STAGES": tile.stages, "CACHE": 2**22,
        "warps": tile.warps, **SEEN,
    }  # fmt: skip
    part = "forward" if kernel == "forward_kernel" else "backward"
    return compile_kernel(f"lssar.ops.fused.activation_{part}", kernel, constants, cache)


WINDOW_SPECS = {"softmax": "softmax", "cosine": "cosine_softmax", "softplus": "lssar"}


def compile_window(part, kind, D, tile, cache):
    """A windowed kernel as a model's layers run it: causal, bfloat16, without padding."""
    spec, steep = lssar.spec(WINDOW_SPECS[kind]), kind == "softplus"
    constants = {
        **_mechanism(spec.literal, spec.p, D, torch.bfloat16), **SEEN, "PACKED": False, "HAS_LENGTHS": False,
        "GAIN": False, "FIXED": kind == "cosine", "GROUP": 1, "WIDE": False, "TMA": tile.tma, "BLOCK_M": tile.m,
        "BLOCK_N": tile.n, "STAGES": tile.stages, "warps": tile.warps,
        "STEEP": steep, "STEEP_ROWS": HOPPER["window_query_gradient_softplus", D, 2].m if steep else 0,
    }  # fmt: skip
    if part != "forward":
        constants |= {f"{name}_STEP": D for name in ("Q", "K", "V", "O", "DO", "DQ", "DK", "DV")}
    types = {"p": "fp32", "key_scale_ptr": "*fp32", "to_keys_ptr": "*fp32"}
    if tile.tma:
        block = [1, 1, tile.m if part == "key_gradient" else tile.n, D]
        types |= dict.fromkeys(("q_tiles", "k_tiles", "v_tiles", "do_tiles"), f"tensordesc<bf16{block}>")
    return compile_kernel(f"lssar.ops.fused.window_{part}", f"{part}_kernel", constants, cache, **types)


def compile_from_table(kernel, D, tile, cache):
    """By its name in the table: LSSAR's, a windowed one or an activation's."""
    for part, kind in itertools.product(WINDOW_PARTS, WINDOW_KINDS):
        if kernel.removesuffix("_long") == f"window_{part}_{kind}":
            return compile_window(part, kind, D, tile, cache)
    name = kernel.removeprefix("activation_") + "_kernel"
    if name != f"{kernel}_kernel":
        return compile_activation(name, D, "sigmoid", 0, tile, cache)
    module = "forward" if kernel == "forward" else "backward"
    return compile_lssar(f"lssar.ops.fused.{module}", name, D, "lssar, steep", tile, cache)


@pytest.mark.parametrize(
    ("kernel", "D", "mechanism"),
    [
        ("forward_kernel", 128, "lssar, steep"),
        ("key_gradient_kernel", 64, "lssar, steep"),
        ("query_gradient_kernel", 64, "lssar, steep, any power, gain"),
        pytest.param("forward_kernel", 128, "lssar, steep, any power, gain", marks=pytest.mark.slow),
        pytest.param("key_gradient_kernel", 128, "lssar, any power", marks=pytest.mark.slow),
        pytest.param("forward_kernel", 64, "lssa", marks=pytest.mark.slow),
        pytest.param("key_gradient_kernel", 128, "lssa", marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 64, "lssa", marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 128, "lssar, steep", marks=pytest.mark.slow),
    ],
)
def test_gluon(kernel, D, mechanism, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    made = compile_lssar("lssar.ops.fused.hopper", kernel, D, mechanism, Tile(64, 64, 4, 2, tma=True), tmp_path)
    assert 2 * (made["shared"] + 1024) <= MULTIPROCESSOR, "two programs have to fit on a multiprocessor"
    assert made["wgmma"] > 0
    assert made["barriers left"] == 0, "the compiler may reuse the memory of a barrier that is not ended"


@pytest.mark.parametrize("kernel", [f"window_{part}_kernel" for part in WINDOW_PARTS])
@pytest.mark.parametrize(("kind", "D"), [("cosine", 128), pytest.param("softplus", 128, marks=pytest.mark.slow)])
def test_gluon_of_windows(kernel, kind, D, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    spec, steep = lssar.spec(WINDOW_SPECS[kind]), kind == "softplus"
    constants = {
        **_mechanism(spec.literal, spec.p, D, torch.bfloat16), "CAUSAL": True, "PACKED": False, "GAIN": False,
        "FIXED": kind == "cosine", "GROUP": 1, "STEEP": steep, "BLOCK": 64, "BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 2,
        "K_STEP": D, "DK_STEP": D, "DV_STEP": D, "O_STEP": D, "DQ_STEP": D, "warps": 4,
    }  # fmt: skip
    types = {"p": "fp32", "key_scale_ptr": "*fp32", "to_keys_ptr": "*fp32"}
    types |= dict.fromkeys(("q_all", "k_all", "v_all", "do_all"), f"tiles 64 {D}")
    made = compile_kernel("lssar.ops.fused.hopper", kernel, constants, tmp_path, **types)
    assert 2 * (made["shared"] + 1024) <= MULTIPROCESSOR, "two programs have to fit on a multiprocessor"
    assert made["wgmma"] > 0 and made["barriers left"] == 0


def of_the_table(activation, more, in_ci):
    """Kernels and head sizes of the table for Triton, with more values each; those not in CI take too long together."""
    kinds = [(kernel, D) for kernel, D, _ in HOPPER if not kernel.endswith("_hopper")]
    values = [(*kind, *also) for kind in kinds if kind[0].startswith("activation_") == activation for also in more]
    return [pytest.param(*each, marks=() if each in in_ci else pytest.mark.slow) for each in values]


IN_CI = [
    ("query_gradient", 64), ("window_forward_softmax", 64), ("window_query_gradient_softmax", 64),
    ("window_key_gradient_cosine", 128),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "D"), of_the_table(False, [()], in_ci=IN_CI))
def test_triton(kernel, D, tmp_path):
    """What runs on Hopper at other head sizes and without Gluon, with its own tiles and the branches of steep rows."""
    made = compile_from_table(kernel, D, HOPPER[kernel, D, 2], tmp_path)
    assert made["shared"] <= MULTIPROCESSOR - 1024
    assert made["wgmma"] > 0 and not made["overwritten"]


@pytest.mark.parametrize(
    "D", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
def test_repair_of_gradients(D, tmp_path):
    """Runs after the dk, dv kernel, by pointers: without descriptors, whatever the tile of the table says."""
    tile = dataclasses.replace(HOPPER["key_gradient", D, 2], tma=False)
    made = compile_lssar("lssar.ops.fused.backward", "key_gradient_kernel", D, "lssar, repair", tile, tmp_path)
    assert made["shared"] <= MULTIPROCESSOR - 1024
    assert not made["overwritten"]


@pytest.mark.parametrize(
    ("kernel", "D", "activation", "p"),
    of_the_table(
        True, [("exp", 0), ("gelu", 15), ("sigmoid", 0), ("relu2", 3)],
        in_ci=[("activation_forward", 64, "exp", 0), ("activation_key_gradient", 64, "gelu", 15)],
    ),
)  # fmt: skip
def test_activations(kernel, D, activation, p, tmp_path):
    name = kernel.removeprefix("activation_") + "_kernel"
    made = compile_activation(name, D, activation, p, HOPPER[kernel, D, 2], tmp_path)
    assert made["shared"] <= MULTIPROCESSOR - 1024
    assert made["wgmma"] > 0 and not made["overwritten"]


@pytest.mark.parametrize("kernel", ["loss_kernel", "loss_gradient_kernel"])
def test_loss(kernel, tmp_path):
    fp32 = dict.fromkeys(("loss_ptr", "norm_ptr", "gradient_ptr"), "*fp32")
    constants = {"BLOCK": BLOCK, "warps": WARPS}
    compile_kernel("lssar.ops.fused.loss", kernel, constants, tmp_path, targets_ptr="*i64", **fp32)


@pytest.mark.parametrize(
    ("K", "norm", "activation", "rows", "plan", "others"),
    [
        (768, "layer", "gelu", 1, (8, 1024), 3),  # bias, and weight and bias of the norm
        (3072, "none", "none", 1, (2, 4096), 1),
        (768, "layer", "gelu", 16, (16, 256), 4),
        pytest.param(2048, "rms", "swiglu", 1, (4, 2048), 10, marks=pytest.mark.slow),
        pytest.param(8192, "none", "none", 1, (4, 4096), 4, marks=pytest.mark.slow),
        pytest.param(2048, "rms", "swiglu", 16, (16, 128), 5, marks=pytest.mark.slow),
    ],
)
def test_linear_layer_of_a_step(K, norm, activation, rows, plan, others, tmp_path):
    """The weights of a tile are asked for before the wait for the previous kernel, and nothing of x and the residual,
    which that kernel may write: so the number of loads is exact."""
    constants = {
        "NORM": norm, "ACTIVATION": activation, "HAS_BIAS": True, "HAS_SHIFT": norm == "layer", "HAS_RESIDUAL": True,
        "K": K, "M": rows, "BLOCK_N": plan[0], "BLOCK_K": plan[1], "STAGES": Plan.stages, "DOT": "tf32",
        "AHEAD": True, "warps": Plan.warps,
    }  # fmt: skip
    made = compile_kernel("lssar.ops.fused.linear", "linear_kernel", constants, tmp_path)
    assert made["shared"] <= (1024 if rows == 1 else 99 * 1024)  # as much as small cards have
    tile = plan[0] * plan[1] // (8 * 32 * Plan.warps) * (1 + (activation == "swiglu"))
    before, after = made["loads"]
    assert before == tile + others and after > 0


@pytest.mark.parametrize("kernel", ["split_kernel", "combine_kernel", "append_kernel"])
def test_decode_of_softmax(kernel, tmp_path):
    """Nothing is read before the previous kernel has ended."""
    constants = {
        "split_kernel": {
            "COSINE": False, "LOG_N": False, "SCALE": 0.125, "SMALL": 2.0**-12, "GROUP": 1, "HAS_GAIN": False, "D": 64,
            "BLOCK_D": 64, "HAS_LENGTHS": True, "PAGE": 0, "WIDE": False, "DOT": "tf32", "NORMS": "product",
            "WHOLE": True, "BLOCK_R": 1, "BLOCK_N": 64, "STAGES": 3,
        },
        "combine_kernel": {"COSINE": False, "D": 64, "BLOCK_D": 32, "BLOCK_SPLITS": 64},
        "append_kernel": {"ROTATE": True, "D": 64, "BLOCK": 32},
    }[kernel] | {"AHEAD": True, "warps": 1 if kernel == "append_kernel" else 4}  # fmt: skip
    fp32 = dict.fromkeys(("part_ptr", "o_part_ptr", "cos_ptr", "sin_ptr"), "*fp32")
    types = {**fp32, "lengths_ptr": "*i32", "table_ptr": "*i32", "at_ptr": "*i64"}
    made = compile_kernel("lssar.ops.fused.decode_softmax", kernel, constants, tmp_path, **types)
    assert made["loads"][0] == 0 and made["loads"][1] > 0


DECODE = {"GROUP": 4, "Lq": 1, "D": 128, "BLOCK_R": 4, "AHEAD": True, "warps": 4}
DECODE_KEYS = {
    "LOG_D": math.log(128), "BLOCK_D": 128, "HAS_LENGTHS": False, "PAGE": 0, "WIDE": False, "LOG_DEGREE": 5,
    "DOT": "tf32", "HAS_GAIN": False, "BLOCK_N": 64, "STAGES": 3, "FETCH": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("score_kernel", DECODE_KEYS | {"NORMS": "product"}),
        ("value_kernel", DECODE_KEYS | {"P": 15, "REWEIGHT": True, "BLOCK_X": 512, "BLOCK_SPLITS": 64}),
        ("combine_kernel", {"BLOCK_D": 32, "BLOCK_SPLITS": 64}),
    ],
)
def test_decode(kernel, constants, tmp_path):
    """Nothing is read before the previous kernel has ended, and the keys of four programs fit a multiprocessor."""
    fp32 = dict.fromkeys(("sum_ptr", "max_ptr", "o_part_ptr", "z_part_ptr", "z_ptr"), "*fp32")
    types = {**fp32, "tolerance": "fp32", "x_ptr": "*i16", "list_ptr": "*i32", "lengths_ptr": "*i32"}
    types["o_ptr"] = "*fp32" if kernel == "value_kernel" else "*bf16"
    made = compile_kernel("lssar.ops.fused.decode", kernel, DECODE | constants, tmp_path, **types)
    assert made["loads"][0] == 0 and made["loads"][1] > 0
    assert 4 * (made["shared"] + 1024) <= MULTIPROCESSOR


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "D"), [key[:2] for key in HOPPER if not key[0].endswith("_hopper")])
def test_no_tile_that_it_falls_back_to_is_filled_while_a_product_reads_it(kernel, D, tmp_path):
    tile, tried = HOPPER[kernel, D, 2], 0
    while (tile := tile.smaller()) is not None:
        assert not compile_from_table(kernel, D, tile, tmp_path)["overwritten"], tile
        tried += 1
    assert tried > 2


@pytest.mark.slow
def test_a_tile_with_that_fault_has_it_still(tmp_path):
    """If not, Triton has fixed it, or the names in its output changed and the tests above find nothing."""
    assert compile_from_table("activation_key_gradient", 256, Tile(32, 64, 8, 2), tmp_path)["overwritten"]


def test_a_tile_that_is_filled_while_a_product_reads_it_is_found():
    """One buffer, a product of the tensor cores under way, and the next copy; with all waited for, nothing is wrong."""
    text = """
    %q = ttg.local_alloc : () -> !ttg.memdesc<1x32x256xbf16, #shared1, #smem, mutable>
    %q_1 = ttg.memdesc_index %q[%c0] : !ttg.memdesc<1x32x256xbf16> -> !ttg.memdesc<32x256xbf16>
    %q_2 = ttg.memdesc_subslice %q_1[0, 0] : !ttg.memdesc<32x256xbf16> -> !ttg.memdesc<16x256xbf16>
    %dk = ttng.warp_group_dot %ds, %q_2, %dk_0 {isAsync = true} : tensor<64x16xbf16> * !ttg.memdesc<16x256xbf16>
    %dk_3:2 = ttng.warp_group_dot_wait %dk, %q_2 {pendings = 3 : i32} : tensor<64x256xf32>
    %copy = ttg.async_copy_global_to_local %pointers, %q_1 : tensor<32x256x!tt.ptr<bf16>> -> <32x256xbf16>
    """
    assert overwritten(text) == ["q"]
    assert not overwritten(text.replace("pendings = 3", "pendings = 0"))
    assert not overwritten(text.replace("1x32x256xbf16, #shared1", "2x32x256xbf16, #shared1"))
