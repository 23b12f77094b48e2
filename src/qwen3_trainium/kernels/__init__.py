"""NKI kernels. Each file imports plain `nki` and runs unchanged on trn2 or under a simulator."""
