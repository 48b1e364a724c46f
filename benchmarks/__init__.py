"""Side-by-side measurements and the reference data of the tests: each one command, run from the project's root."""
