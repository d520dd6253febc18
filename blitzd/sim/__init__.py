"""The virtual world: scheduler lab, roofline, placement search, KV accounting.

Promises: time is integer nanoseconds and randomness is seeded, so the same inputs give
the same report hash in any process; jumping over equal decode steps gives token for token
what stepping through them gives; a bad input is refused with its line and field.
"""
