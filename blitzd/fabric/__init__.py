"""Byte movers between workers: mapped arenas on one node, UCX between nodes.

Promises: a dead or stalled peer ends its own transfers and nothing else."""
