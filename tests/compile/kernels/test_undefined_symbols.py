"""What the state kernels' libraries need from outside: they are loaded without TVM or a C library.

The shapes are those where LLVM would see a loop that only copies or only clears.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import tvm
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.cached_attention import cached_attention
from emberd.compile.kernels.causal_convolution import causal_convolution
from emberd.compile.kernels.gated_activation import gated_activation
from emberd.compile.kernels.gated_delta_rule import gated_delta_rule
from emberd.compile.kernels.integer_attention import integer_attention
from emberd.compile.kernels.rms_norm import rms_norm
from emberd.compile.kernels.rotary_embedding import rotary_embedding

ALLOWED = {"TVMFFIErrorSetRaisedFromCStrParts", "cosf", "sinf", "sincosf"}


def test_only_libm_and_the_error_report(isa: Isa, tmp_path: Path) -> None:
    functions = []
    for tokens in (1, None):
        functions += [
            rms_norm(isa, columns=64, eps=1e-6, zero_centred=True, gated=False, rows=tokens),
            causal_convolution(isa, channels=64, kernel_size=4, tokens=tokens),
            rotary_embedding(isa, heads=16, head_dim=256, rotary_dim=64, tokens=tokens),
            gated_activation(isa, kind="silu", columns=64, tokens=tokens),
            gated_delta_rule(
                isa, key_heads=1, value_heads=2, key_dim=32, value_dim=128, tokens=tokens
            ),
            cached_attention(isa, query_heads=16, kv_heads=1, head_dim=256, tokens=tokens),
            *(
                integer_attention(
                    isa, query_heads=16, kv_heads=1, head_dim=250, bits=bits, tokens=tokens
                )
                for bits in (8, 16)
            ),
        ]
    module = tvm.IRModule({str(f.attrs["global_symbol"]): f for f in functions})
    objects = tmp_path / "kernels.o"
    tvm.tirx.build(module, target=isa.target).write_to_file(str(objects))
    listing = subprocess.run(
        ["nm", "--undefined-only", "--format=posix", str(objects)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = {line.split()[0] for line in listing.splitlines()}
    assert needed - {"_GLOBAL_OFFSET_TABLE_"} <= ALLOWED
