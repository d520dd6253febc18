"""The OpenAI, admin and metrics routes over the node's public face.

Promises: every error has OpenAI's error object as its body and names the field; nothing
a client sends is ignored or makes a 500; a client that leaves, or does not read, frees
what its request held; every wait has a deadline (`Limits`).
"""

from blitzd.http.limits import Limits
from blitzd.http.server import Serving, admin_app, public_app, serve

__all__ = ["Limits", "Serving", "admin_app", "public_app", "serve"]
