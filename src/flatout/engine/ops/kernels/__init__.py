"""Triton kernels, each tested against plain PyTorch. They are imported only if Triton
is installed, which GPU builds of PyTorch include."""
