"""Traces of requests: what was asked when, without the content. Read from every published form, or made by `loadgen synth`."""
