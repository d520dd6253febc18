"""The virtual world: scheduler lab, roofline, placement search, KV accounting."""
