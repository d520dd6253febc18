"""State: the replica and request machines and the fold that events drive.

Promises: every transition is a row of one table; an event the table does not allow is
refused and changes nothing; the same events give the same state and the same hash."""
