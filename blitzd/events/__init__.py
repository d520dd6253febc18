"""The append-only log: event types, codec, segments.

Promises: what `append` and `sync` acknowledged survives a kill; a damaged log is refused
with file and offset, never read as something else; the same record has the same bytes."""
