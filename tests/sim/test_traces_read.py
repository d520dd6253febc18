"""Every public trace shape is read; a bad one is refused with line and field."""

import json

import pytest

from blitzd.sim.data import AZURE_CONV, RTX4090_REQUESTS, SHAREGPT_LENGTHS
from blitzd.sim.errors import InputError, TraceError
from blitzd.sim.traces import load_trace

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROW = "2023-11-16 18:15:46.6805900,374,44\n"


def write(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_azure():
    requests = load_trace(AZURE_CONV)
    assert len(requests) == 3000
    assert requests[0] == (0, 374, 44)
    assert requests[1] == (4_314_579_000, 396, 109)
    assert load_trace(AZURE_CONV, limit=2) == requests[:2]


def test_llmservingsim_and_lengths():
    measured = load_trace(RTX4090_REQUESTS)
    assert len(measured) == 300
    assert measured[0] == (0, 2358, 531)
    lengths = load_trace(SHAREGPT_LENGTHS)
    assert len(lengths) == 300
    assert lengths[0] == (0, 55, 4)


def test_burstgpt(tmp_path):
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,ChatGPT,1087,230,1317,Conversation log\n"
    )
    assert load_trace(write(tmp_path, text)) == [(0, 472, 18), (40_500_000_000, 1087, 230)]


def test_mooncake_counts_milliseconds_and_bailian_seconds(tmp_path):
    row = {"timestamp": 3, "input_length": 10, "output_length": 4, "hash_ids": [1]}
    later = {**row, "timestamp": 5}
    text = json.dumps(row) + "\n" + json.dumps(later) + "\n"
    assert load_trace(write(tmp_path, text))[1].arrival_ns == 2_000_000
    text = json.dumps({"chat_id": 1, **row}) + "\n\n" + json.dumps({"chat_id": 2, **later})
    assert load_trace(write(tmp_path, text))[1].arrival_ns == 2_000_000_000


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("", 1, "requests"),
        (AZURE_HEADER, 1, "requests"),
        ("time,in,out\n1,2,3\n", 1, "header"),
        (AZURE_HEADER + AZURE_ROW + AZURE_ROW.replace("18:15", "18:14"), 3, "TIMESTAMP"),
        (AZURE_HEADER + AZURE_ROW.replace("2023-11-16", "yesterday"), 2, "TIMESTAMP"),
        (AZURE_HEADER + AZURE_ROW.replace("374", "-374"), 2, "ContextTokens"),
        (AZURE_HEADER + AZURE_ROW.replace(",44", ",0"), 2, "GeneratedTokens"),
        (AZURE_HEADER + AZURE_ROW.replace(",44", ""), 2, "GeneratedTokens"),
        (AZURE_HEADER + AZURE_ROW.replace("374", "many"), 2, "ContextTokens"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 0}', 1, "output_length"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1}', 1, "timestamp"),
        ('{"timestamp": 1, "input_length": 5.5, "output_length": 1}', 1, "input_length"),
        ('{"input_length": 5, "output_length": 1}', 1, "timestamp"),
        ('{"a": 1}', 1, "record"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}\n[1]', 2, "record"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}\n{', 2, "record"),
    ],
)
def test_bad_traces_are_refused_with_line_and_field(tmp_path, text, line, field):
    with pytest.raises(TraceError) as refused:
        load_trace(write(tmp_path, text))
    assert (refused.value.line, refused.value.field) == (line, field)
    assert f"trace:{line}: {field}: " in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere: cannot be read"):
        load_trace(tmp_path / "nowhere")
