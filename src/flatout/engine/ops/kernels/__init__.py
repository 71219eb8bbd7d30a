"""Triton kernels, each with plain PyTorch beside it in a test. Imported where a GPU
build of PyTorch brings Triton along, and only there."""
