"""The placement document's KV figures, and models and GPUs from files."""

import json

import pytest

from blitzd.cli.sim import app
from blitzd.sim import kv
from blitzd.sim.errors import InputError
from blitzd.sim.hardware import GPUS, find_gpu
from blitzd.sim.models import MODELS, find_model
from blitzd.sim.roofline import Roofline

H100 = GPUS["h100"]


def run_cli(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    return ended.value.code, capsys.readouterr()


def shares(model, tp, tokens):
    account = kv.account(MODELS[model], H100, tp, tokens, 10)
    return {link["name"]: link["share_of_prefill"] for link in account.report["links"]}


def test_opt_66b_at_512_tokens():
    opt = MODELS["opt-66b"]
    assert opt.kv_bytes_per_token == 2.25 * 2**20
    assert 512 * opt.kv_bytes_per_token == 1.125 * 2**30
    # The paper's 90 Gb/s takes the 1.125 GiB for 1.125 GB.
    assert kv.gbit_per_s(opt, 512, 10) == pytest.approx(96.6, abs=0.1)
    assert 1.125e9 * 10 * 8 / 1e9 == 90


def test_llama_70b_bytes():
    llama = MODELS["llama-3.1-70b"]
    assert llama.kv_bytes_per_token == 320 * 1024
    assert 512 * llama.kv_bytes_per_token / 1e9 == pytest.approx(0.17, abs=0.005)


@pytest.mark.parametrize(("model", "tp"), [("llama-3.1-8b", 1), ("llama-3.1-70b", 8)])
@pytest.mark.parametrize("tokens", [1000, 8000])
def test_share_of_prefill_by_link(model, tp, tokens):
    share = shares(model, tp, tokens)
    assert share["nic-400g"] < 0.2
    assert 0.005 < share["nvlink"] < 0.02
    assert 0.005 < share["8x-nic-400g"] < 0.02
    assert 1 / 3 < share["ethernet-100g"] < 2 / 3


def test_one_ethernet_card_carries_38_requests_a_second():
    account = kv.account(MODELS["llama-3.1-70b"], H100, 8, 1000, 10)
    rates = {link["name"]: link["requests_per_s"] for link in account.report["links"]}
    assert rates["ethernet-100g"] == pytest.approx(38, abs=0.5)


def test_parameter_counts_are_the_published_ones():
    billions = {name: round(model.parameters / 1e9, 1) for name, model in MODELS.items()}
    assert billions["llama-2-7b"] == 6.7
    assert billions["llama-3.1-8b"] == 8.0
    assert billions["llama-3.1-70b"] == 70.6
    assert billions["mistral-24b"] == 23.6
    assert billions["qwen2.5-72b"] == 72.7
    assert billions["opt-13b"] == 12.8
    assert billions["opt-66b"] == 65.7


def test_decode_of_70b_has_no_room_on_two_gpus():
    def capacity(tp):
        return Roofline(MODELS["llama-3.1-70b"], H100, tp).kv_capacity_tokens()

    assert capacity(1) == 0
    assert 0 < capacity(2) < 50_000 < capacity(4) < capacity(8)


def test_the_json_has_the_promised_fields(capsys):
    code, printed = run_cli(
        capsys,
        "kv",
        "--model",
        "opt-66b",
        "--tokens",
        "512",
        "--gpu",
        "a100",
        "--tp",
        "4",
        "--json",
    )
    report = json.loads(printed.out)
    assert code == 0
    assert (report["bytes_per_token"], report["kv_bytes"]) == (2359296, 1207959552)
    assert 0 < report["prefill_s"] < 1
    assert {"name", "seconds", "share_of_prefill"} <= report["links"][0].keys()
    assert len(report["report_hash"]) == 64


def test_without_a_model_the_documents_tables_come_out(capsys, tmp_path):
    code, printed = run_cli(capsys, "kv", "--csv", str(tmp_path))
    assert code == 0
    assert "opt-66b" in printed.out and "llama-3.1-70b" in printed.out
    assert (tmp_path / "kv-traffic.csv").read_text().startswith("model,KiB per token,")


def test_a_model_from_a_hugging_face_config(tmp_path):
    path = tmp_path / "config.json"
    config = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    path.write_text(json.dumps(config))
    model = find_model(str(path))
    builtin = MODELS["llama-3.1-70b"]
    assert model.parameters == builtin.parameters
    assert model.kv_bytes_per_token == builtin.kv_bytes_per_token
    del config["hidden_size"]
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="hidden_size or n_embd: a positive whole number"):
        find_model(str(path))


def test_a_gpu_from_a_file(tmp_path):
    path = tmp_path / "gpu.json"
    card = {
        "name": "x",
        "tflops": 400,
        "memory_gb": 64,
        "memory_gb_s": 3200,
        "nvlink_gb_s": 200,
        "nic_gb_s": 25,
    }
    path.write_text(json.dumps(card))
    assert find_gpu(str(path)).tflops == 400
    for change, message in (
        ({"tflops": 0}, "tflops: 0.0 must be above 0"),
        ({"colour": 1}, "unknown field `colour`.*fields: name, tflops"),
    ):
        path.write_text(json.dumps({**card, **change}))
        with pytest.raises(InputError, match=message):
            find_gpu(str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt-5"), "model: 'gpt-5' is neither one of opt-13b"),
        (("--model", "opt-13b", "--gpu", "abacus"), "gpu: 'abacus' is neither one of h100"),
        (("--model", "opt-13b", "--tp", "3"), "tp: 3 does not divide the 40 KV heads"),
    ],
)
def test_unknown_names_are_refused_with_what_exists(capsys, arguments, message):
    code, printed = run_cli(capsys, "kv", *arguments)
    assert code == 1
    assert message in printed.err
