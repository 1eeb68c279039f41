"""Whether an engine finds a device here: `python -m workers.devices ENGINE DEVICE` exits with 0 if so.

A command of its own, since PyTorch takes seconds and hundreds of megabytes to ask.
"""

import sys


def has_device(engine: str, device: str) -> bool:
    """Whether `llama_cpp` or `transformers` can use `cuda` or `mps` on this machine."""
    if (device == "mps") != (sys.platform == "darwin"):
        return False
    if engine == "llama_cpp":
        import llama_cpp

        return bool(llama_cpp.llama_supports_gpu_offload())
    import torch

    return bool(torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available())


if __name__ == "__main__":
    sys.exit(not has_device(*sys.argv[1:]))
