"""The worker process: model, paged KV, attention, sampling, step loop.

Promises: greedy tokens of a request do not depend on its batch, its path or its replica."""
