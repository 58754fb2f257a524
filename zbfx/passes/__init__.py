"""The compiler's passes: pure functions, one file each."""
