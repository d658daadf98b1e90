"""What the gateway costs, measured: `make bench`. How, and how to read it: README.md beside this file."""
