"""Decisions: pure functions from state and input to events and commands.

Promises: no clock, no randomness, no I/O; equal inputs decide equally."""
