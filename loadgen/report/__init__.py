"""What a replay came to: figures from its outcomes, as a table, JSON, CSV and one HTML page; two of them side by side."""
