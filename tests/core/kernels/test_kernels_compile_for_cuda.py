"""Every Triton kernel compiles for a GPU, which needs none: the interpreter accepts what the compiler refuses."""

import inspect

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import meshwright.core.kernels as package  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
LOSS = {
    **dict.fromkeys(("stride", "vocab", "width", "ignore_index"), "i32"),
    "logits": "*bf16",
    "labels": "*i64",
    "log_sums": "*fp32",
    "targets": "*fp32",
    "softcap": "fp32",
}
CAST = dict.fromkeys(("rows", "columns", "stride", "padded_rows"), "i32") | {
    "x": "*bf16",
    **dict.fromkeys(("row_amax", "column_amax", "row_scale", "column_scale"), "*fp32"),
    **dict.fromkeys(("by_rows", "by_columns"), "*fp8e4nv"),
}
BOTH = {"BY_ROWS": True, "BY_COLUMNS": True}
ADAMW = {
    **dict.fromkeys(("addresses", "gradients", "sizes"), "*i64"),
    "blocks": "*i32",
    **dict.fromkeys(("factors", "corrections", "scalars"), "*fp32"),
    **dict.fromkeys(("lr", "beta1", "beta2", "rest1", "rest2", "eps"), "fp32"),
}
NORM = {"addresses": "*i64", "blocks": "*i32", "sizes": "*i64", "sums": "*fp32"}
SCALE = {"source": "*fp32", "factor": "*fp32", "target": "*bf16", "count": "i64"}
BF16 = triton.language.bfloat16
CASES = [
    ("cross_entropy_kernel", "cross_entropy_rows", LOSS, {"CAPPED": c, "STATISTICS": s, "GRADIENT": g, "BLOCK": 2048})
    for c, s, g in [(False, True, True), (True, True, True), (False, True, False), (False, False, True)]
] + [
    ("cross_entropy_kernel", "scale_elements", SCALE, {"BLOCK": 4096}),
    ("float8_kernel", "amax_kernel", CAST, {**BOTH, "ROWS": 128, "COLUMNS": 64, "TILES": 4}),
    ("float8_kernel", "cast_kernel", CAST, {**BOTH, "LARGEST": 448.0, "SMALLEST": 1e-12, "ROWS": 64, "COLUMNS": 128}),
    ("adamw_kernel", "adamw_kernel", ADAMW, {"GRADIENT": BF16, "WEIGHT": BF16, "ALIGNED": True, "BLOCK": 1024}),
    (
        "adamw_kernel",
        "adamw_kernel",
        ADAMW,
        {"GRADIENT": triton.language.float32, "WEIGHT": BF16, "ALIGNED": False, "BLOCK": 1024},
    ),
    ("gradient_norm_kernel", "square_sums_kernel", NORM, {"DTYPE": BF16, "ALIGNED": True, "BLOCK": 8192}),
    (
        "gradient_norm_kernel",
        "square_sums_kernel",
        NORM,
        {"DTYPE": triton.language.float32, "ALIGNED": False, "BLOCK": 8192},
    ),
]


@pytest.mark.parametrize(("module", "name", "types", "constants"), CASES, ids=lambda value: str(value)[:40])
def test_kernel_compiles_for_hopper(module, name, types, constants):
    kernel = getattr(__import__(f"{package.__name__}.{module}", fromlist=[name]), name)
    parameters = list(inspect.signature(kernel.fn).parameters)
    signature = {key: "constexpr" if key in constants else types[key] for key in parameters}
    values = {(parameters.index(key),): value for key, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, values), target=HOPPER)
    assert compiled.asm["ptx"]
    if constants.get("ALIGNED"):  # a thread moves 16 bytes at once: without that, AdamW takes half as long again
        assert "ld.global.v4.b32" in compiled.asm["ptx"]


def test_every_kernel_is_compiled():
    from pathlib import Path

    jitted = {
        (path.stem, name)
        for path in Path(package.__file__).parent.glob("*.py")
        if "@triton.jit" in path.read_text()
        for name, value in vars(__import__(f"{package.__name__}.{path.stem}", fromlist=["x"])).items()
        if isinstance(value, triton.JITFunction) and value.__module__.endswith(path.stem)
    }
    helpers = {("adamw_kernel", "tensor_at"), ("adamw_kernel", "adamw_block")}  # functions that kernels call
    assert jitted - helpers == {(module, name) for module, name, _, _ in CASES}
