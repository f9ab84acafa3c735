"""Triton kernels; imported only once a tensor has to go through them."""
