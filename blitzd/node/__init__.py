"""The driver: one ordered inbox, append, act; worker supervision; the public face."""
