"""The ``qemu`` backend: boxes with kernels of their own, forked from one guest booted once."""
