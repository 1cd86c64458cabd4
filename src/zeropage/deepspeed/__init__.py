"""A package shaped like `deepspeed`, every name of it mapped onto zeropage."""
