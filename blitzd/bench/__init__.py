"""Load generation and measurements against public interfaces."""
