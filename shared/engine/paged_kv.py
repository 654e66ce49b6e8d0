"""Bookkeeping of KV blocks: who holds which, how often. Pure; the tensors are the engine's."""
