"""The bytes of a record: exact there and back, and stable."""

import msgspec
import pytest
from hypothesis import given, strategies as st
from log_samples import Grown, Moved, Sampled, Ticked, raw_frame, records

from blitzd.events import (
    Kind,
    Payload,
    Record,
    RecordRefused,
    UnknownPayload,
    UnknownRecord,
    upcaster,
)
from blitzd.events.codec import Chain, FrameDecoder, encode_batch, scan

START = Chain(0, 1)
GOLDEN = (
    "06000000 444c5a46 69451df8 e8fd0103 03000000 00000000 03000000 00000000 "
    "03000000 00000000 00000000 00000000 03000000 93a17205 91060000 00000000"
)
U64 = st.integers(0, (1 << 64) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
PAYLOADS = st.one_of(
    st.builds(Moved, TEXT, U64, st.lists(U64, max_size=20).map(tuple)),
    st.builds(Ticked, st.integers(-(1 << 63), (1 << 64) - 1)),
    st.builds(Sampled, U64, TEXT),
)


@st.composite
def appends(draw: st.DrawFn) -> list[list[Record]]:
    seq = draw(st.integers(1, 1 << 62))
    batches = []
    for size in draw(st.lists(st.integers(1, 6), max_size=6)):
        batch = []
        for _ in range(size):
            wall = draw(st.integers(-(1 << 63), (1 << 63) - 1))
            batch.append(Record(seq, wall, draw(U64), draw(U64), draw(PAYLOADS)))
            seq += 1
        batches.append(batch)
    return batches


@given(appends(), st.integers(0, (1 << 32) - 1))
def test_any_records_come_back_as_they_were(batches: list[list[Record]], crc: int) -> None:
    start = Chain(crc, batches[0][0].seq if batches else 1)
    data, chain = b"", start
    for batch in batches:
        frames, chain = encode_batch(batch, chain, 0)
        assert len(frames) % 8 == 0
        data += frames
    decoded, taken = FrameDecoder().decode(data, 0, start)
    assert decoded == [record for batch in batches for record in batch]
    assert (taken.offset, taken.chain, taken.fault) == (len(data), chain, None)
    assert scan(data, 0, start) == taken


@given(appends(), st.data())
def test_a_cut_anywhere_leaves_whole_appends(
    batches: list[list[Record]], data: st.DataObject
) -> None:
    start = Chain(0, batches[0][0].seq if batches else 1)
    buffer, chain, ends = b"", start, [0]
    for batch in batches:
        frames, chain = encode_batch(batch, chain, 0)
        buffer += frames
        ends.append(len(buffer))
    size = data.draw(st.integers(0, len(buffer)))
    whole = sum(end <= size for end in ends) - 1
    decoded, taken = FrameDecoder().decode(buffer[:size], 0, start)
    assert decoded == [record for batch in batches[:whole] for record in batch]
    assert taken.offset == ends[whole]
    assert scan(buffer[:size], 0, start).offset == ends[whole]


def test_the_bytes_of_a_frame_are_what_the_description_says() -> None:
    """Format 1, for ever: a change here needs a new format version."""
    encoded, chain = encode_batch([Record(3, 3, 3, 0, Moved("r", 5, (6,)))], Chain(99, 3), 0)
    frame, crc = raw_frame(Moved.type_id, 1, ["r", 5, [6]], seq=3, crc=99)
    assert encoded == frame
    assert chain == Chain(crc, 4)
    assert frame.hex(" ", 4) == GOLDEN


def test_equal_records_have_equal_payload_bytes() -> None:
    one, _ = encode_batch(records(1, 20), START, 0)
    other, _ = encode_batch(records(1, 20), START, 0)
    assert one == other


@pytest.mark.parametrize(
    ("version", "fields", "now"),
    [
        (1, ["a"], Grown("a")),
        (2, ["a", 3], Grown("a", 3072)),
        (3, ["a", 3, "n"], Grown("a", 3, "n")),
    ],
)
def test_old_schema_versions_are_read(version: int, fields: list[object], now: Grown) -> None:
    frame, _ = raw_frame(Grown.type_id, version, fields)
    decoded, _ = FrameDecoder().decode(frame, 0, START)
    assert [record.payload for record in decoded] == [now]


@pytest.mark.parametrize(
    ("type_id", "version", "known"),
    [(64_999, 1, "no such type"), (Grown.type_id, 4, "Grown up to version 3")],
)
def test_what_must_be_understood_and_is_not_is_refused(
    type_id: int, version: int, known: str
) -> None:
    first, crc = raw_frame(Moved.type_id, 1, ["r", 1])
    second, _ = raw_frame(type_id, version, ["?", 1, "", 7], seq=2, crc=crc)
    with pytest.raises(UnknownRecord, match=f"record 2 has type id {type_id}.*{known}"):
        FrameDecoder().decode(first + second, 0, START)
    decoded, _ = FrameDecoder(forensic=True).decode(first + second, 0, START)
    assert [r.seq for r in decoded] == [1, 2]


def test_what_may_be_skipped_comes_as_unknown() -> None:
    frame, _ = raw_frame(64_999, 7, ["?"], must_understand=False)
    decoded, _ = FrameDecoder().decode(frame, 0, START)
    raw = msgspec.msgpack.encode(["?"])
    assert decoded[0].payload == UnknownPayload(64_999, 7, Kind.EVENT, False, raw)


@pytest.mark.parametrize("seq", [1, 3])
def test_a_sequence_out_of_order_is_a_fault_though_its_checksum_is_right(seq: int) -> None:
    first, crc = raw_frame(Moved.type_id, 1, ["r", 1])
    second, _ = raw_frame(Moved.type_id, 1, ["r", 2], seq=seq, crc=crc)
    decoded, taken = FrameDecoder().decode(first + second, 0, START)
    assert [r.seq for r in decoded] == [1]
    assert taken.fault is not None
    assert taken.fault.reason == f"sequence is {seq}, expected 2"
    assert scan(first + second, 0, START) == taken


def test_a_payload_that_does_not_fit_its_type_is_a_fault() -> None:
    frame, _ = raw_frame(Moved.type_id, 1, ["r", "not a number"])
    decoded, taken = FrameDecoder().decode(frame, 0, START)
    assert decoded == []
    assert taken.fault is not None
    assert "does not decode" in taken.fault.reason


def test_only_registered_types_enter() -> None:
    class Stray(Payload, frozen=True, array_like=True):
        pass

    with pytest.raises(RecordRefused, match="Stray is not a registered record type"):
        encode_batch([Record(1, 0, 0, 0, Stray())], START, 0)
    unknown = UnknownPayload(1, 1, Kind.EVENT, False, b"")
    with pytest.raises(RecordRefused, match="UnknownPayload"):
        encode_batch([Record(1, 0, 0, 0, unknown)], START, 0)


def test_upcasters_leave_no_gap_and_no_choice() -> None:
    with pytest.raises(ValueError, match="has an upcaster from version 2"):
        upcaster(Grown.type_id, 2)(lambda fields: fields)
    with pytest.raises(ValueError, match="has no upcaster from version 1"):
        upcaster(Moved.type_id, 2)(lambda fields: fields)
