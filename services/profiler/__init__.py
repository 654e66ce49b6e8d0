"""`triptych profile`: measures what each stage costs on this machine, alone, and fits the cost model to it."""
