"""Compiles one FlashInfer module that the attention back end loads, and prints its path.

    python scripts/compile_flashinfer.py decode|prefill DTYPE HEAD_DIM [--window]

Needs nvcc but no device; FLASHINFER_CUDA_ARCH_LIST names the devices ("8.0", "9.0a"),
FLASHINFER_WORKSPACE_BASE where the results go.
"""

import argparse

import torch
from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module

NO_POSITIONS = 0
"""Of FlashInfer's position encodings: keys and queries come rotated."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("decode", "prefill"))
    parser.add_argument("dtype", choices=("bfloat16", "float16"))
    parser.add_argument("head_dim", type=int)
    parser.add_argument("--window", action="store_true", help="for a sliding window")
    asked = parser.parse_args()
    dtype = getattr(torch, asked.dtype)
    shape = (dtype, dtype, dtype, torch.int32, asked.head_dim, asked.head_dim, NO_POSITIONS)
    if asked.kind == "decode":
        module = gen_batch_decode_module(*shape, asked.window, False)
    else:
        module = gen_batch_prefill_module("fa2", *shape, asked.window, False, False)
    module.build(verbose=False)
    print(module.jit_library_path)


if __name__ == "__main__":
    main()
