"""Packaged measurements; see README.md here for provenance and licences."""

from pathlib import Path

HERE = Path(__file__).parent
DISTSERVE_PROFILE = HERE / "distserve" / "profiler-a100-80g.distserve.json"
DISTSERVE_CAPACITY = HERE / "distserve" / "max_num_tokens.csv"
SHAREGPT_LENGTHS = HERE / "distserve" / "sharegpt_300.csv"
SPLITWISE_PERF_MODEL = HERE / "splitwise" / "perf_model.csv"
RTX4090_REQUESTS = HERE / "llmservingsim" / "requests.jsonl"
AZURE_CONV = HERE / "azure" / "conv_first_3000.csv"
AZURE_CODE_BURST = HERE / "azure" / "code_burst_700.csv"
