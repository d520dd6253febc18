"""The OpenAI, admin and metrics routes over the node's public face."""
