"""`loadgen bench NAME`: what we do beside what others do, in one run on the same cores. runner.py and report.py are common
to all; each benchmark is a module that measures, with the sides it compares beside it, and a command in commands.py."""
