"""Makes traces: from the distributions of published ones, from mixes of clients, from scripted bursts."""
