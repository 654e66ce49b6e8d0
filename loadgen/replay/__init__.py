"""Replays a trace against a server, open loop, and tells what its users would have seen."""
