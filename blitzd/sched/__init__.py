"""Iteration scheduling inside one replica, shared by the engine and the simulator.

Promises: pure; no block leaks whatever the order of admission, preemption and cancel."""
