"""LLM serving that changes the number and the role of its replicas in a blink."""

__version__ = "0.1.0"
