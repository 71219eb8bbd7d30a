"""Triton kernels, each tested against plain PyTorch. Imported only if a GPU build of
PyTorch has installed Triton."""
