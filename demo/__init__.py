"""What `make run` and `make demo` start. Nothing here is part of the gateway."""
