"""dflash-serve: LLM serving with DFlash block-diffusion speculative decoding.

Importing this package needs no GPU, no ray and no triton, and does not initialise CUDA.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
