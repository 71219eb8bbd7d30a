"""Triton kernels, each tested against plain PyTorch. They are imported only if Triton
is installed. GPU builds of PyTorch include Triton."""
