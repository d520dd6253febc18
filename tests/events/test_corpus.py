"""Logs of earlier versions are read as they were meant."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from log_samples import record

from blitzd.events import LogReader, LogWriter
from blitzd.events.json_form import record_json

CORPUS = sorted(path for path in (Path(__file__).parent / "corpus").iterdir() if path.is_dir())


@pytest.mark.parametrize("directory", CORPUS, ids=lambda path: path.name)
def test_an_old_log_is_read_and_continued(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "log"
    shutil.copytree(directory, copy)
    expected = [json.loads(line) for line in (copy / "expected.jsonl").open(encoding="utf-8")]
    found = [msgspec.json.encode(record_json(r)) for r in LogReader(copy).records()]
    assert list(map(json.loads, found)) == expected
    writer = LogWriter.open(copy)
    assert writer.last_seq == expected[-1]["seq"]
    writer.append([record(writer.last_seq + 1)])
    writer.close()
    assert len(list(LogReader(copy).records())) == len(expected) + 1


def test_the_count_of_what_was_skipped(tmp_path: Path) -> None:
    with LogReader(CORPUS[0]).cursor() as cursor:
        while cursor.read():
            pass
    assert dict(cursor.unknown) == {64_999: 1}
