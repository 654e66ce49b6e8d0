VENV ?= .venv
export PYTHONSAFEPATH = 1
.PHONY: types
types:  ## link the folders as one package, for the type checker
	@mkdir -p build/types/triptych
	@for d in services shared cache loadgen; do ln -sfn ../../../$$d build/types/triptych/$$d; done
