"""llama.cpp behind lines of JSON, for `bench_llamacpp.py`, which starts it.

Runs in a virtual environment of its own, with llama-cpp-python and numpy; knows nothing of
blitzd. A line `[batch, context, steps]` is answered by `[wall seconds, CPU seconds]`: of that
many decode steps of `batch` sequences that have `context` tokens each, or, with batch 0, of
`steps` prompts of `context` tokens.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp as lib
import numpy as np

SEQUENCES = 8
PROMPT_TOKENS = 512
SLACK = 64


class Peer:
    def __init__(self, path: str, threads: int, longest: int) -> None:
        lib.llama_backend_init()
        self._silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._silent, ctypes.c_void_p(0))
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = (SEQUENCES + 1) * (longest + SLACK)
        params.n_seq_max = SEQUENCES + 1
        params.n_batch = params.n_ubatch = PROMPT_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit(f"{path} cannot be used")
        self._memory = lib.llama_get_memory(self._context)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = lib.llama_batch_init(PROMPT_TOKENS, 0, 1)
        self._filled = [0] * SEQUENCES

    def prompt(self, tokens: int) -> None:
        self._forget(SEQUENCES, 0)
        ids = range(100, 100 + tokens)
        self._decode([(SEQUENCES, at, i, at == tokens - 1) for at, i in enumerate(ids)])
        self._best(tokens - 1)

    def decode(self, batch: int, context: int, steps: int) -> tuple[float, float]:
        for sequence in range(SEQUENCES):
            self._fill(sequence, context if sequence < batch else 0)
        began = time.perf_counter(), time.process_time()
        ids = [1] * batch
        for step in range(steps):
            self._decode([(s, context + step, ids[s], True) for s in range(batch)])
            ids = [self._best(s) for s in range(batch)]
        return time.perf_counter() - began[0], time.process_time() - began[1]

    def _fill(self, sequence: int, context: int) -> None:
        """Real keys and values: shared cells would be read once for all."""
        self._filled[sequence] = min(self._filled[sequence], context)
        self._forget(sequence, self._filled[sequence])
        while (done := self._filled[sequence]) < context:
            end = min(context, done + PROMPT_TOKENS)
            self._decode([(sequence, at, 100 + at, False) for at in range(done, end)])
            self._filled[sequence] = end

    def _forget(self, sequence: int, start: int) -> None:
        lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = wanted
        status = lib.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode: {status}")

    def _best(self, row: int) -> int:
        logits = lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


def main() -> None:
    path, threads, longest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    peer = Peer(path, threads, longest)
    print(json.dumps(lib.__version__), flush=True)
    for line in sys.stdin:
        batch, context, steps = json.loads(line)
        if batch:
            took = peer.decode(batch, context, steps)
        else:
            began = time.perf_counter(), time.process_time()
            for _ in range(steps):
                peer.prompt(context)
            took = time.perf_counter() - began[0], time.process_time() - began[1]
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
