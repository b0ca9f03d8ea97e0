"""The checks of the interview, one module per property; `registry.py` lists them."""
